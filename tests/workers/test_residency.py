"""The order in which memory comes and goes takes no more than any other order, and what the uses need is there."""

import random
from itertools import permutations
from typing import Any

import pytest
import torch

from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.workers.context import PeakMemory
from mindspeed_rl.workers.residency import Step, may_leave, peak, steps

NEEDS = {
    "resharding": {"param", "rollout_weights"},
    "rollout": {"rollout_weights", "kv_cache"},
    "reward_model": {"reward_model"},
    "reference": {"reference"},
    "value": {"critic_param"},
    "old_log_prob": {"param"},
    "update": {"param", "grad", "optimizer", "critic_param", "critic_grad", "critic_optimizer"},
}
AFTER_UPDATE = NEEDS["update"]  # what the device holds when an iteration begins
PARTS = (*AFTER_UPDATE, "reference", "reward_model", "rollout_weights", "kv_cache")


def config(kl_penalty: str = "k1", **offload: bool) -> Config:
    switches: dict[str, Any] = {f"offload_train_{part}": True for part in ("param", "grad", "optimizer")}
    rl: dict[str, Any] = {"init_kl_coef": 0.1, "epochs": 2, "adv_estimator": "gae"}  # every stage that there is
    rl["kl_penalty"] = kl_penalty
    generate = {**switches, "offload_reference": True, "offload_reward_model": True, **offload}
    sections = {"megatron_training": {}, "rl_config": rl, "generate_config": generate}
    return Config.model_validate({**sections, "reward_config": {"load": "reward"}})


def random_sizes(seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    return {name: draw.choice([1, 10, 100]) * draw.random() for name in (*PARTS, *(f"use {use}" for use in NEEDS))}


@pytest.mark.parametrize("seed", range(20))
def test_no_order_can_take_less(seed: int) -> None:
    """The peak is what is there at the beginning, or what some use needs: less is impossible."""
    sizes = random_sizes(seed)
    inevitable = max(
        sum(sizes[part] for part in AFTER_UPDATE),
        *(sizes[f"use {use}"] + sum(sizes[part] for part in needs) for use, needs in NEEDS.items()),
    )
    assert peak(steps(config()), sizes, AFTER_UPDATE, config()) == pytest.approx(inevitable)


@pytest.mark.parametrize("seed", range(3))
def test_all_orders_around_resharding(seed: int) -> None:
    sizes, cfg = random_sizes(seed), config()
    moves = [Step("offload", (part,), "") for part in ("grad", "optimizer", "param")]
    moves[1] = Step("offload", ("optimizer", "critic_param", "critic_grad", "critic_optimizer"), "")  # not one by one
    moves += [Step("onload", (part,), "") for part in ("rollout_weights", "kv_cache")]
    peaks = [
        peak(order, sizes, AFTER_UPDATE, cfg)
        for order in permutations([*moves, "resharding", "rollout"])
        if is_valid(order)
    ]
    sequence = list(steps(cfg))
    ours = sequence[: sequence.index("rollout") + 1]
    assert len(peaks) > 100
    assert max(peaks) > min(peaks)
    assert peak(ours, sizes, AFTER_UPDATE, cfg) == pytest.approx(min(peaks))


def is_valid(order: Any) -> bool:
    there, uses = set(AFTER_UPDATE), []
    for step in order:
        if isinstance(step, str):
            uses.append(step)
            if not NEEDS[step] <= there or (step == "rollout" and there & AFTER_UPDATE):
                return False
        elif step.action == "onload":
            there.update(step.parts)
        else:
            there.difference_update(step.parts)
    return uses == ["resharding", "rollout"]


@pytest.mark.parametrize("stays", ["train_param", "train_grad", "train_optimizer", "reference", "reward_model", None])
def test_every_use_finds_what_it_needs(stays: str | None) -> None:
    """In the first iteration, where nothing of rollout is there, and in those after it."""
    cfg = config(**({f"offload_{stays}": False} if stays else {}))
    there = set(AFTER_UPDATE) | ({stays} & {"reference", "reward_model"} if stays else set())
    kept = {part for part in PARTS[:-2] if stays and part.removeprefix("critic_") == stays.removeprefix("train_")}
    uses = []
    for step in [*steps(cfg), *steps(cfg)]:
        if isinstance(step, str):
            uses.append(step)
            assert NEEDS[step] <= there, step
            if step == "rollout":
                assert there == {"rollout_weights", "kv_cache"} | kept
        elif step.action == "onload":
            there.update(step.parts)
        else:
            there.difference_update(part for part in step.parts if may_leave(cfg, part))
    assert uses == 2 * list(NEEDS)


def test_the_reference_is_there_in_updates_that_need_all_of_its_vocabulary() -> None:
    cfg, there, uses = config("full"), set(AFTER_UPDATE), []
    for step in [*steps(cfg), *steps(cfg)]:
        if isinstance(step, str):
            uses.append(step)
            assert NEEDS[step] <= there, step
            assert ("reference" in there) == (step == "update")
        elif step.action == "onload":
            there.update(step.parts)
        else:
            there.difference_update(step.parts)
    assert uses == 2 * [use for use in NEEDS if use != "reference"]


def test_without_adapters_the_actor_is_the_reference() -> None:
    cfg, there = config(), set(AFTER_UPDATE)
    cfg = cfg.model_copy(update={"actor_config": cfg.actor_config.model_copy(update={"lora_r": 8})})
    cfg.__dict__["actor"] = cfg.actor_config
    for step in [*steps(cfg), *steps(cfg)]:
        if isinstance(step, str):
            assert {"param" if part == "reference" else part for part in NEEDS[step]} <= there, step
            assert "reference" not in there
        elif step.action == "onload":
            there.update(step.parts)
        else:
            there.difference_update(step.parts)


def test_sizes_count_while_they_are_there() -> None:
    cfg = config(offload_train_grad=False)
    sizes = {"param": 2.0, "grad": 4.0, "optimizer": 6.0, "rollout_weights": 2.0, "kv_cache": 9.0, "use rollout": 1.0}
    moves = [Step("offload", ("grad", "optimizer"), ""), Step("onload", ("rollout_weights",), "")]
    assert peak([], sizes, AFTER_UPDATE, cfg) == 12
    # gradients stay, as the configuration says
    assert peak([*moves, Step("onload", ("kv_cache",), "")], sizes, AFTER_UPDATE, cfg) == 2 + 4 + 2 + 9
    assert peak([*moves, Step("onload", ("kv_cache",), ""), "rollout"], sizes, AFTER_UPDATE, cfg) == 18


def test_a_peak_leaves_out_what_is_asleep() -> None:
    peak, size = PeakMemory(CpuDevice()), 64 << 20
    peak.reset()
    block = torch.ones(size, dtype=torch.uint8)
    awake = peak.nbytes
    peak.asleep(size)
    assert peak.nbytes >= awake  # what it was before counts
    peak.reset()
    assert awake - peak.nbytes > size - (8 << 20)
    peak.asleep(0)
    assert awake - peak.nbytes < 8 << 20
    assert block.sum() == size
