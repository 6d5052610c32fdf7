"""The reward worker judges groups, and the dock has its later stages see those that qualify."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl.algorithms.group_filter import differs_within
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.data.prompts import PromptSample
from mindspeed_rl.rewards.manager import RewardResult
from mindspeed_rl.transfer_dock.local import LocalTransferDock
from mindspeed_rl.transfer_dock.spec import Filter
from mindspeed_rl.workers.context import Context
from mindspeed_rl.workers.reward_worker import RewardWorker
from mindspeed_rl.workers.rollout import Rollout
from mindspeed_rl.workers.stages import dock_spec, selection

NAN = math.nan
GROUP, MAX_TOKENS = 4, 6
# prompt -> what the verifier `format` says of its samples; `acc` is 1 for all of them
FORMAT = [[1, 0, 0, 1], [0.5] * 4, [NAN, 0, NAN, 1], [NAN, NAN, NAN, 1], [1, 1, 1, 1]]
LENGTHS = [[3] * 4, [3] * 4, [3] * 4, [3] * 4, [3, 3, 3, MAX_TOKENS]]
PROMPTS, ROWS = len(FORMAT), len(FORMAT) * GROUP


@pytest.mark.parametrize(
    ("metric", "rewards", "expected"),
    [
        ([0, 0, 0, 1], [0, 0, 0, 0], True),
        ([1, 1, 1], [0, 1, 2], False),
        ([1, NAN, 1, NAN], [1, 1, 1, 1], False),
        ([1, NAN, 0, NAN], [1, 1, 1, 1], True),
        ([1, 0], [1, NAN], False),
        ([NAN, NAN], [0, 1], False),
        ([0.1 + 0.2, 0.3], [1, 1], False),
        ([1], [1], False),
    ],
)
def test_a_group_qualifies_if_two_scored_samples_differ(metric, rewards, expected):
    assert differs_within(metric, rewards) is expected


@dataclass
class Manager:
    """Verifiers whose values are known."""

    done: int = 0

    def score(self, samples, scores=None):
        first, self.done = self.done, self.done + len(samples)
        values = [float(value) for group in FORMAT for value in group][first : self.done]
        total = [1 + value for value in values]
        return RewardResult(
            {"acc": [1.0] * len(values), "format": values}, {}, {}, total, [math.isnan(value) for value in total]
        )


class Tokenizer:
    """Decodes nothing."""

    def batch_decode(self, tokens, skip_special_tokens):
        return ["" for _ in tokens]


def settings(*overrides: str):
    return load_config(
        "dapo_trainer_tiny_cpu",
        [
            f"megatron_training.global_batch_size={PROMPTS}",
            f"rl_config.mini_batch_size={PROMPTS}",
            f"rl_config.n_samples_per_prompt={GROUP}",
            "rl_config.actor_resource.num_npus=1",
            "rl_config.verifier_function=[acc,format]",
            "rl_config.verifier_weight=[1.0,1.0]",
            f"generate_config.sampling_config.max_tokens={MAX_TOKENS}",
            *overrides,
        ],
    )[0]


def generated(config):
    """A dock with an iteration whose responses are there, and the lengths of these."""
    dock = LocalTransferDock(dock_spec(config, derive_layout(config)))
    dock.begin(0, PROMPTS, GROUP, ROWS, selection=selection(config))
    sample = PromptSample([1, 2], "1+1=", "2", "sums", {})
    dock.put(0, range(ROWS), {"prompt_ids": [torch.tensor([1, 2])] * ROWS, "sample": [sample] * ROWS})
    lengths = [length for group in LENGTHS for length in group]
    while (claim := dock.claim("rollout", 0, ROWS)) is not None:
        tokens = [torch.zeros(lengths[row], dtype=torch.int64) for row in claim.rows]
        log_probs = [torch.zeros(lengths[row]) for row in claim.rows]
        dock.ack(claim, {"responses": tokens, "rollout_log_probs": log_probs, "policy_versions": tokens})
    return dock, lengths


@pytest.mark.parametrize(
    ("metric", "qualifying"),
    [("reward", [0, 2, 4]), ("format", [0, 2]), ("acc", [])],
    ids=["reward", "format", "acc"],
)
@pytest.mark.parametrize("keep_order", ["true", "false"])
def test_groups_that_do_not_differ_are_rejected_and_counted(
    metric: str, qualifying: list[int], keep_order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_rl.workers.reward_worker.RewardManager", lambda rl: Manager())
    config = settings(f"rl_config.filter_groups_metric={metric}", f"rl_config.guarantee_order={keep_order}")
    assert selection(config) == Filter(PROMPTS)
    dock, lengths = generated(config)
    worker = RewardWorker(config, derive_layout(config), Tokenizer(), dock, str(tmp_path))  # type: ignore[arg-type]
    report = worker.score(0)
    rejected = PROMPTS - len(qualifying)
    assert report.metrics.finalize()["reward/filtered_groups"] == rejected / PROMPTS
    groups = dock.stats()["groups"][0]
    assert groups["rejected"] == rejected
    assert groups["selected"] == (0 if keep_order == "true" else len(qualifying))
    dock.fill(0)
    assert dock.stats()["groups"][0] == {**groups, "selected": PROMPTS, "filled": rejected}
    trained = worker.compute_advantages(0, 0.0)
    assert sorted(trained.sequence_lengths) == sorted(2 + length for length in lengths)
    while (claim := dock.claim("old_log_prob", 0, GROUP)) is not None:
        dock.ack(claim, {"old_log_probs": [torch.zeros(lengths[row]) for row in claim.rows]})
    useful = set()
    while (claim := dock.claim("update", 0, GROUP)) is not None:
        found = zip(claim.rows, dock.get(claim, ["advantages"])["advantages"], strict=True)
        useful |= {row // GROUP for row, advantages in found if advantages.any()}
        dock.ack(claim)
    assert useful == {0, 2, 3, 4}, "a lone scored sample has its reward for advantage; where none differ, it is 0"


def test_no_wave_draws_the_random_numbers_of_another() -> None:
    config = settings("generate_config.per_request_seed=false", "rl_config.actor_resource.num_npus=2")
    layout, seeds = derive_layout(config), list[int]()
    device = SimpleNamespace(manual_seed=seeds.append)
    for rank in range(layout.rollout_replicas):
        context = Context(rank, rank, config, layout, device, generated(config)[0])  # type: ignore[arg-type]
        rollout = Rollout(context, engine=None)  # type: ignore[arg-type]
        for wave in range(3):
            rollout.generate(0, [], wave)
    assert len(set(seeds)) == 6
