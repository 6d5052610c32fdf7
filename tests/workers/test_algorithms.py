"""Every policy loss and correction through the workers that compute them, in one layout against another."""

from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import Worlds, run_ranks

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl.checkpoint.state import CheckpointStore
from mindspeed_rl.common.timing import Timings
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.transfer_dock.local import LocalTransferDock
from mindspeed_rl.transfer_dock.spec import Claim
from mindspeed_rl.workers.reward_worker import RewardWorker
from mindspeed_rl.workers.stages import advantage_results, dock_spec, scoring_stages

PROMPTS, GROUP, MAX_TOKENS = 8, 4, 6
ROWS = PROMPTS * GROUP
KL_COEF = 0.1
BASE = [
    "megatron_training.train_iters=1",
    f"megatron_training.global_batch_size={PROMPTS}",
    "megatron_training.data_path=unused",
    "actor_config.micro_batch_size=4",
    "actor_config.lr=3e-2",  # large, so that the second update starts from another policy
    "actor_config.adam_eps=1e-2",  # else a step has the size of lr whatever the gradient: its noise would decide
    f"rl_config.mini_batch_size={PROMPTS // 2}",
    f"rl_config.n_samples_per_prompt={GROUP}",
    "rl_config.init_kl_coef=0.1",
    "rl_config.balance_batch=false",  # each rank has a dock of its own: what it scores must be what it trains on
    "rl_config.actor_forward_micro_batch_size=8",
    "rl_config.ref_forward_micro_batch_size=8",
    f"generate_config.sampling_config.max_tokens={MAX_TOKENS}",
]
HIGHER = ["rl_config.clip_higher_enable=true", "rl_config.clip_ratio_low=0.1", "rl_config.clip_ratio_high=0.3"]
BY_SEQUENCE = "rl_config.loss_agg_mode=seq-mean-token-mean"
SUMS = "rl_config.loss_agg_mode=seq-mean-token-sum"
CASES: dict[str, list[str]] = {
    "ppo": ["rl_config.clip_ratio_c=1.5", *HIGHER],
    "gspo": ["rl_config.loss_type=gspo", "rl_config.clip_ratio=0.05", BY_SEQUENCE],
    "cispo": ["rl_config.loss_type=cispo", *HIGHER, "rl_config.rollout_is=all"],
    "sapo": ["rl_config.loss_type=sapo", "rl_config.rollout_is=all", "rl_config.rollout_is_level=geometric", SUMS],
    "gmpo": ["rl_config.loss_type=gmpo", *HIGHER, BY_SEQUENCE, "rl_config.kl_penalty=k3+"],
    "clip_cov": ["rl_config.loss_type=clip_cov", "rl_config.clip_cov_ratio=0.1", "rl_config.clip_cov_lb=0.1"],
    "kl_cov": ["rl_config.loss_type=kl_cov", "rl_config.kl_cov_ratio=0.1", "rl_config.use_kl_in_reward=true"],
    "mask": [
        "rl_config.rollout_is=all",
        "rl_config.rollout_is_mode=mask",
        "rl_config.rollout_is_level=sequence",
        "rl_config.rollout_is_threshold=3",
        "rl_config.rollout_is_veto_threshold=0.5",
        f"{SUMS}-norm",
    ],
    "full": ["rl_config.kl_penalty=full", "rl_config.epochs=2"],
    "rollout": ["rl_config.recompute_logprobs=false", "rl_config.epochs=2"],
    "rollout masked": [
        "rl_config.recompute_logprobs=false",
        "rl_config.rollout_is=all",
        "rl_config.rollout_is_mode=mask",
        "rl_config.rollout_is_threshold=1.05",
    ],
    "critic": [
        "megatron_training.stage=ray_ppo",
        "rl_config.adv_estimator=gae",
        "rl_config.cliprange_value=0.2",
        "critic_config.lr=1e-2",
        "critic_config.micro_batch_size=5",
    ],
    "shared": [
        "megatron_training.stage=ray_ppo",
        "rl_config.adv_estimator=gae",
        "rl_config.critic_shares_actor=true",
        "rl_config.value_loss_coef=0.7",
        "rl_config.cliprange_value=0.2",
    ],
    "stopped": ["rl_config.early_stop_imp_ratio=1.0001", "rl_config.epochs=2"],
}
ONE = ["rl_config.actor_resource.num_npus=1"]
LAYOUTS = {
    "one": ONE,
    "DP2": ["rl_config.actor_resource.num_npus=2", "actor_config.micro_batch_size=3"],
    "CP2": ["rl_config.actor_resource.num_npus=2", "actor_config.context_parallel_size=2"],
    "PP2": ["rl_config.actor_resource.num_npus=2", "actor_config.pipeline_model_parallel_size=2"],
    "TP2": [
        "rl_config.actor_resource.num_npus=2",
        "actor_config.tensor_model_parallel_size=2",
        "actor_config.sequence_parallel=true",
    ],
}
TURNS = ["DP2", "CP2", "PP2", "TP2"]
CHOSEN = {  # others get one each, in turn
    "critic": ["TP2", "PP2", "CP2", "DP2"],
    "shared": ["TP2", "PP2", "CP2", "DP2"],
    "clip_cov": ["DP2"],  # ranks choose tokens together
    "kl_cov": ["DP2", "PP2"],
}
RESUMED = {"critic": ["one", "TP2", "PP2", "CP2"], "shared": ["one", "PP2"]}
SEEN = {
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/values",
    "critic/grad_norm",
    "actor/loss",
    "actor/pg_loss",
    "actor/kl",
    "actor/grad_norm",
    "actor/imp_ratio",
    "actor/pg_clipfrac",
}
TOLERANCE = 2e-5
WEIGHT_TOLERANCE = 1e-4


def configured(folder: str, *overrides: str) -> Config:
    files = [f"actor_config.load={folder}", f"megatron_training.tokenizer_name_or_path={folder}"]
    return load_config("grpo_trainer_tiny_cpu", [*BASE, *files, *overrides])[0]


def samples() -> dict[str, list[torch.Tensor]]:
    """An iteration, the same in every process: one failed sample, one empty response, rollout a bit off."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, MAX_TOKENS + 1, ROWS)
    lengths[6] = 0
    prompts = [torch.tensor(rng.integers(1, 16, rng.integers(2, 6))) for _ in range(PROMPTS)]
    advantages = rng.normal(size=ROWS)
    masks = [torch.ones(n) for n in lengths]
    masks[9].zero_()
    return {
        "prompt_ids": [prompts[row // GROUP] for row in range(ROWS)],
        "responses": [torch.tensor(rng.integers(1, 16, n)) for n in lengths],
        "rollout_log_probs": [torch.tensor(-2.7 + 0.4 * rng.normal(size=n), dtype=torch.float32) for n in lengths],
        "advantages": [torch.full((n,), a, dtype=torch.float32) for n, a in zip(lengths, advantages, strict=True)],
        "loss_mask": masks,
        "returns": [torch.tensor(rng.normal(size=n), dtype=torch.float32) for n in lengths],
    }


def start(
    worlds: Worlds, folder: str, overrides: list[str], state: str | None = None, weights: str | None = None
) -> Any:
    """This rank's training role: new, from the model or a checkpoint's weights, or going on from a checkpoint."""
    from mindspeed_rl.workers.context import Context, Source
    from mindspeed_rl.workers.training import Training

    config = configured(folder, *overrides)
    layout, rank = derive_layout(config), dist.get_rank()
    dock = LocalTransferDock(dock_spec(config, layout))  # one for each rank, with the same in it
    context = Context(rank, rank, config, layout, worlds.device, dock)
    return Training(context, resolve_model(config), Source(folder, weights or folder, state=state))


def iterate(training: Any, iteration: int) -> dict[str, float]:
    """Score and update; metrics of all ranks."""
    rl, dock = training.config.rl_config, training.dock
    dock.begin(iteration, PROMPTS, GROUP, block_rows=rl.mini_batch_size * GROUP)
    made = set(advantage_results(training.config))
    columns = {*dock.spec.consumers["rollout"].puts, "prompt_ids", *made}
    dock.put(iteration, range(ROWS), {name: values for name, values in samples().items() if name in columns})
    timings = Timings(iteration)
    for stage in scoring_stages(training.config):
        training.score(stage, timings)
    metrics = training.update(KL_COEF, timings)
    dock.clear(iteration)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, metrics)
    whole = type(metrics)()
    for each in of_ranks:
        whole.merge(each)
    return whole.finalize()


def weights_of(training: Any) -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for name, tensor in training.export_weights()}
    if training.critic is not None:
        weights |= {f"critic.{name}": tensor.clone() for name, tensor in training.critic.export_weights(1 << 20)}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    pieces = [piece for piece in training.engine.pieces(optimizer=False) if piece.name.startswith("value_head.")]
    dist.all_gather_object(of_ranks, [(piece.offsets, piece.data.clone()) for piece in pieces])
    if head := sorted(chain(*of_ranks), key=itemgetter(0)):
        weights["critic.head"] = torch.cat([columns for _, columns in head], dim=1)
    return weights


def save(training: Any, root: str) -> None:
    store = CheckpointStore(root, model=training.model, layout=training.layout)
    store.begin(1)
    training.save(root, 1)
    store.commit(1, {"iteration": 1})


def update_in_all(rank: int, root: str, folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    """All cases on one rank and in layouts of two, in one start of the ranks: (case, layout) -> what came out."""
    worlds, found = Worlds(rank, 2, root), {}
    for number, (name, overrides) in enumerate(CASES.items()):
        others = CHOSEN.get(name, [TURNS[number % len(TURNS)]])
        for layout in ("one", *others):
            with worlds.world(1 if layout == "one" else 2) as here:
                if here:
                    training = start(worlds, folder, [*overrides, *LAYOUTS[layout]])
                    found[name, layout] = {"metrics": iterate(training, 0), "weights": weights_of(training)}
                    if layout == "one" and name in RESUMED:
                        save(training, f"{root}/{name}")
                        found[name, "uninterrupted"] = {"metrics": iterate(training, 1)}
    for name, layouts in RESUMED.items():
        path = f"{root}/{name}/iter_0000001"
        for layout in layouts:
            with worlds.world(1 if layout == "one" else 2) as here:
                if here:
                    training = start(worlds, folder, [*CASES[name], *LAYOUTS[layout]], path)
                    weights = weights_of(training)
                    found[f"resumed {name}", layout] = {"weights": weights, "metrics": iterate(training, 1)}
        with worlds.world(1) as here:  # a new run, which takes over the critic, too
            if here:
                training = start(worlds, folder, [*CASES[name], *ONE], weights=path)
                found[f"finetuned {name}", "one"] = {"weights": weights_of(training)}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def updates(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = run_ranks(
        2, update_in_all, str(tmp_path_factory.mktemp("worlds")), folder
    )[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_layouts_and_micro_batches_update_the_same(case: str, updates: dict[tuple[str, str], dict[str, Any]]) -> None:
    one, *others = (f for (name, layout), f in updates.items() if name == case and layout != "uninterrupted")
    assert others
    for other in others:
        assert one["metrics"].keys() == other["metrics"].keys()
        for key in one["metrics"].keys() & SEEN:
            assert one["metrics"][key] == pytest.approx(other["metrics"][key], abs=TOLERANCE, rel=1e-4), key
        assert one["weights"].keys() == other["weights"].keys()
        for name, weight in one["weights"].items():
            torch.testing.assert_close(other["weights"][name], weight, atol=WEIGHT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", RESUMED)
def test_a_critic_goes_on_in_any_layout(name: str, updates: dict[tuple[str, str], dict[str, Any]]) -> None:
    saved, expected = updates[name, "one"]["weights"], updates[name, "uninterrupted"]["metrics"]
    assert any(key.startswith("critic.") and weight.any() for key, weight in saved.items())
    finetuned = updates[f"finetuned {name}", "one"]["weights"]
    assert all(torch.equal(finetuned[key], weight) for key, weight in saved.items())
    for layout in RESUMED[name]:
        found = updates[f"resumed {name}", layout]
        assert all(torch.equal(found["weights"][key], weight) for key, weight in saved.items()), layout
        for key in expected.keys() & SEEN:
            tolerance = {"abs": 0.0, "rel": 0.0} if layout == "one" else {"abs": TOLERANCE, "rel": 1e-4}
            assert found["metrics"][key] == pytest.approx(expected[key], **tolerance), (layout, key)


def test_every_case_acts(updates: dict[tuple[str, str], dict[str, Any]]) -> None:
    """What each case is about has happened in it: the numbers are those of an update that it has shaped."""
    found = {name: updates[name, "one"]["metrics"] for name in CASES}
    for name in ("ppo", "gspo", "cispo", "gmpo", "clip_cov"):
        assert 0 < found[name]["actor/pg_clipfrac"] < 1, name
    assert found["ppo"]["actor/pg_clipfrac_lower"] > 0
    for name in ("clip_cov", "kl_cov"):
        assert 0.03 < found[name]["actor/cov_fraction"] < 0.11, name
    for name in ("cispo", "sapo"):
        assert found[name]["rollout/is_weight"] != 1, name
    assert found["mask"]["rollout/is_masked"] > 0
    assert found["mask"]["rollout/is_vetoed"] > 0
    bypassed = found["rollout masked"]  # whose ratio holds the weight: 1 or 0 is left
    assert 0 < bypassed["rollout/is_masked"] < 1
    assert bypassed["rollout/is_weight"] == pytest.approx(1 - bypassed["rollout/is_masked"])
    in_reward = found["kl_cov"]
    without_kl = in_reward["actor/pg_loss"] - 0.005 * in_reward["actor/entropy"]
    assert in_reward["actor/loss"] == pytest.approx(without_kl, abs=1e-6)
    assert found["ppo"]["actor/kl"] > 0
    for name in ("critic", "shared"):
        assert 0 < found[name]["critic/vf_clipfrac"] < 1
        assert found[name]["critic/values"] != 0  # from the second update on
    losses = [metrics["actor/loss"] for name, metrics in found.items() if name != "critic"]
    assert len(set(losses)) == len(losses)


def test_a_shared_critic_scores_in_the_pass_of_old_log_probs(folder: str) -> None:
    def scored(*overrides: str) -> dict[str, dict[str, str]]:
        config = configured(folder, *CASES["shared"], "rl_config.init_kl_coef=0", *overrides)
        return {name: stage.columns for name, stage in scoring_stages(config).items()}

    assert scored() == {"old_log_prob": {"old_log_probs": "log_probs", "values": "values"}}
    # where old log-probs need no pass, values do
    on_policy = f"rl_config.mini_batch_size={PROMPTS}"
    for override in (on_policy, "rl_config.recompute_logprobs=false"):
        assert scored(override) == {"old_log_prob": {"values": "values"}}
    assert scored("rl_config.critic_shares_actor=false", "rl_config.value_loss_coef=0.5", on_policy) == {
        "value": {"values": "values"}
    }


def test_an_update_too_far_from_the_policy_that_generated_is_not_made(
    updates: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """The first of four updates starts from that policy; the second is refused, and none follows."""
    stopped = updates["stopped", "one"]["metrics"]
    assert stopped["actor/early_stopped"] == 3 / 4
    assert stopped["actor/imp_ratio"] > 1


def test_old_log_probs_of_rollout_are_what_the_ratio_starts_from(
    updates: dict[tuple[str, str], dict[str, Any]],
) -> None:
    metrics = updates["rollout", "one"]["metrics"]
    assert metrics["actor/imp_ratio"] != 1
    assert metrics["rollout/logprob_diff_mean"] > 0.1  # still measured against training


# ---- rewards


def scored_dock(config: Config) -> tuple[LocalTransferDock, dict[str, Any]]:
    """An iteration with all that its update reads but what comes from the rewards, which are there."""
    layout = derive_layout(config)
    dock, columns = LocalTransferDock(dock_spec(config, layout)), samples()
    rng = np.random.default_rng(6)
    columns["rewards"] = torch.tensor(rng.integers(0, 3, ROWS) / 2, dtype=torch.float32)
    columns["rewards"][9] = torch.nan
    for name in ("reference_log_probs", "old_log_probs", "values"):
        columns[name] = [torch.tensor(rng.normal(size=len(r)) - 3, dtype=torch.float32) for r in columns["responses"]]
    dock.begin(0, PROMPTS, GROUP, block_rows=config.rl_config.mini_batch_size * GROUP)
    needed = {*dock.spec.consumers["update"].needs, "rewards"} - {"advantages", "loss_mask", "returns"}
    dock.put(0, range(ROWS), {name: columns[name] for name in needed})
    return dock, columns


@pytest.mark.parametrize(
    "overrides",
    [
        ["rl_config.adv_estimator=reinforce_plus_plus", "rl_config.use_kl_in_reward=true", "rl_config.kl_penalty=k1"],
        ["rl_config.adv_estimator=rloo", "rl_config.use_kl_in_reward=true", "rl_config.recompute_logprobs=false"],
        ["rl_config.adv_estimator=group_norm", "rl_config.norm_adv_by_std=false"],
        ["rl_config.adv_estimator=gpg", "rl_config.blocking=true"],
        ["rl_config.adv_estimator=gae", "megatron_training.stage=ray_ppo", "rl_config.lam=0.5"],
    ],
    ids=["whole iteration, KL by old", "groups, KL by rollout", "groups", "blocking", "critic"],
)
def test_advantages_are_of_rewards_and_kl(overrides: list[str], folder: str, tmp_path: Path) -> None:
    config = configured(folder, *ONE, *overrides)
    rl = config.rl_config
    dock, columns = scored_dock(config)
    worker = RewardWorker(config, derive_layout(config), None, dock, str(tmp_path))  # type: ignore[arg-type]
    try:
        worker.compute_advantages(0, KL_COEF)
    finally:
        worker.close()
    found: dict[int, torch.Tensor] = {}
    found_returns: dict[int, torch.Tensor] = {}
    while (claim := dock.try_claim("update", 0, rl.mini_batch_size * GROUP)) is not None:
        assert isinstance(claim, Claim)
        of_claim = dock.get(claim, dock.spec.consumers["update"].needs)
        found |= dict(zip(claim.rows, of_claim["advantages"], strict=True))
        found_returns |= dict(zip(claim.rows, of_claim.get("returns", ()), strict=False))
        dock.ack(claim)
    lengths = torch.tensor([len(response) for response in columns["responses"]])
    mask = columns["rewards"].isfinite().float().repeat_interleave(lengths)
    penalties = None
    if rl.use_kl_in_reward:
        old = columns["old_log_probs" if rl.recompute_logprobs else "rollout_log_probs"]
        reference = torch.cat(columns["reference_log_probs"])
        penalties = KL_COEF * KL_ESTIMATORS[rl.kl_penalty](torch.cat(old), reference)
        assert penalties.abs().mean() > 0.01
    groups = torch.arange(ROWS) // GROUP
    arguments = (columns["rewards"], groups, mask, lengths, rl, penalties, torch.cat(columns["values"]))
    expected, returns = compute_advantages(rl.adv_estimator, *arguments)
    torch.testing.assert_close(torch.cat([found[row] for row in range(ROWS)]), expected)
    if returns is not None:
        torch.testing.assert_close(torch.cat([found_returns[row] for row in range(ROWS)]), returns)


def test_overlong_responses_lose_rewards(folder: str, tmp_path: Path) -> None:
    overlong = ["rl_config.overlong_buffer_enable=true", "rl_config.overlong_buffer=4"]
    config = configured(folder, *ONE, *overlong, "rl_config.overlong_buffer_penalty_factor=0.5")
    worker = RewardWorker(config, derive_layout(config), None, None, str(tmp_path))  # type: ignore[arg-type]
    try:
        penalties = [worker._overlong_penalty(length) for length in range(MAX_TOKENS + 1)]
    finally:
        worker.close()
    assert penalties == [0.0, 0.0, 0.0, 0.125, 0.25, 0.375, 0.5]
