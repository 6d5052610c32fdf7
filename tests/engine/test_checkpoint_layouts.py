"""Checkpoints of every layout loaded into every other one: the same state bit for bit, and training goes on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.checkpoints import load, save
from support.ranks import Worlds, leave_parallel_state, run_ranks
from test_exactness import make_models
from test_experts import EP
from test_training_layouts import (
    DEEP_WEIGHT_TOLERANCE,
    LOSS_TOLERANCE,
    PP,
    SEQUENCES,
    TEMPERATURE,
    TP,
    VPP,
    Layout,
    layout,
    make_batch,
    objective_loss,
)

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import WEIGHTS, CheckpointReader
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.types import Denominators, RolloutBatch

RANKS = 4
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LOCAL = {"use_distributed_optimizer": False}
ONE = layout(1)
DENSE = [
    ONE,
    layout(2),
    layout(3, **LOCAL),
    layout(2, **{TP: 2}),
    layout(4, **{TP: 2}, sequence_parallel=True),
    layout(4, **{PP: 2, VPP: 1}, **OVERLAP),
    layout(2, **{PP: 2}, num_layer_list="3,1"),
    layout(4, **{TP: 2, PP: 2}),
    layout(2, context_parallel_size=2),
]
EXPERTS = [
    ONE,
    layout(3),
    layout(2, **{EP: 2}, **LOCAL),
    layout(4, **{EP: 2, TP: 2}, sequence_parallel=True),
    layout(4, **{EP: 2, PP: 2, VPP: 1}),
    layout(4, **{EP: 4}, context_parallel_size=2),
]
# from a layout to another one; with experts
ROUND_TRIPS = {
    False: (layout(4, **{TP: 2, PP: 2}), layout(3)),
    True: (layout(4, **{EP: 2, TP: 2}, sequence_parallel=True), layout(4, **{EP: 4, PP: 1})),
}


@dataclass(frozen=True)
class Group:
    """Layouts between which the state of a model is handed on, after training it on one rank."""

    layouts: list[Layout]
    settings: dict[str, Any]
    model: dict[str, Any]
    shares_critic: bool = False


DEEPSEEK = {"layers": 4, "experts": 4, "expert_ffn": 32, "n_group": 2, "topk_group": 1}
GROUPS = {
    # with a value head beside the output layer, which is in the checkpoint and not in what is exported
    "dense": Group(DENSE, {}, {"architecture": "llama", "layers": 4}, shares_critic=True),
    # latent attention, a dense layer, shared experts, biases of the router
    "experts": Group(EXPERTS, {}, {"architecture": "deepseek_v3", **DEEPSEEK}),
    # state only: gradients of bfloat16 differ too much between layouts to be compared
    "bf16": Group(
        [ONE, layout(2, **LOCAL), layout(4, **{TP: 2}), layout(2, **{PP: 2})],
        {"bf16": True},
        {"architecture": "qwen2"},
    ),
}


class Run:
    """An engine in a layout."""

    def __init__(self, device: Any, folder: str, layout: Layout, shares_critic: bool = False, **settings: Any):
        from mindspeed_rl.engine.megatron.critic import ActorCriticEngine
        from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

        model = ModelConfig.from_hf(json.loads(Path(folder, "config.json").read_text()))
        cfg = MegatronConfig(**{"lr": 1e-3, "lr_warmup_fraction": 0.5, **layout.settings, **settings})
        initialize_parallel_state(cfg)
        kind = ActorCriticEngine if shares_critic else MegatronEngine
        self.engine = kind(cfg, model, device, 10, HFWeights(folder), with_reference=False)

    def step(self) -> dict[str, float]:
        """Train on a batch that ranks share as evenly as they can; metrics of the whole, on every rank."""
        engine, batch = self.engine, make_batch()
        mine = batch.select(range(engine.data_parallel_rank, SEQUENCES, engine.data_parallel_size))
        tokens = float(torch.cat(batch.columns["loss_mask"]).sum())
        policy = objective_loss(PolicyObjective(RLConfig(entropy_coeff=0.01)), Denominators(tokens, SEQUENCES - 1))

        def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
            value, metrics = policy(micro, outputs)
            if outputs.values is not None:
                value = value + ((outputs.values - 1).square() * torch.cat(micro.columns["loss_mask"])).sum() / tokens
            return value, metrics

        passes = [[index] for index in range(len(mine))]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, engine.train_mini_batch(mine, loss, passes, TEMPERATURE, entropy=True))
        whole = MetricSet()
        for metrics in of_ranks:
            whole.merge(metrics)
        return whole.finalize()

    def assert_has(self, expected: dict[str, torch.Tensor]) -> None:
        """Every tensor that this rank would write, and all weights as it would export them, are these."""
        pieces = self.engine.pieces(optimizer=True)
        for piece in pieces:
            here = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.data.shape, strict=True))
            assert piece.data.dtype == expected[piece.name].dtype, piece.name
            assert torch.equal(piece.data, expected[piece.name][here]), piece.name
        names = torch.tensor([sum(piece.data.numel() for piece in pieces)])
        dist.all_reduce(names)
        assert int(names) == sum(tensor.numel() for tensor in expected.values())
        for name, tensor in self.engine.export_weights(1 << 20):
            assert torch.equal(tensor, expected[WEIGHTS + name]), name


def contents(path: Path) -> dict[str, torch.Tensor]:
    tensors = CheckpointReader(path).tensors
    return {name: tensors.tensor(name) for name in tensors.names()}


def worst_metric(one: dict[str, float], other: dict[str, float]) -> float:
    """Relative where they are larger than 1."""
    return max(abs(one[name] - value) / max(1.0, abs(value)) for name, value in other.items())


def worst(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((torch.as_tensor(one[name]) - other[name]).abs().max()) for name in other)


def exchange(ranks: Worlds, folder: str, root: Path, group: Group) -> dict[str, float]:
    """Train on one rank, hand the state through all pairs of layouts, go on in each; largest differences."""

    def run_in(case: Layout) -> Run:
        return Run(ranks.device, folder, case, group.shares_critic, **group.settings)

    def weights(run: Run) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in run.engine.export_weights(1 << 20)}

    root.mkdir(exist_ok=True)
    first = root / "first" / "iter_0000001"
    with ranks.world(1) as here:
        if here:
            run = run_in(ONE)
            run.step(), run.step()
            save(run.engine, first.parent)
            torch.save((run.step(), weights(run)), root / "uninterrupted")
    expected = contents(first)
    metrics, trained = torch.load(root / "uninterrupted")
    with_head = [name for name in expected if name.startswith("value_head.") and expected[name].any()]
    assert len(with_head) == (3 if group.shares_critic else 0)  # weight and two moments
    assert any(name.startswith("optimizer.exp_avg_sq.") and tensor.any() for name, tensor in expected.items())
    checkpoints = [root / str(number) / "iter_0000001" for number in range(len(group.layouts))]
    for case, path in zip(group.layouts, checkpoints, strict=True):
        with ranks.world(case.world) as here:
            if here:
                run = run_in(case)
                load(run.engine, first)
                save(run.engine, path.parent)
    differences = {"metrics": 0.0, "weights": 0.0}
    for case in group.layouts:
        with ranks.world(case.world) as here:
            if here:
                run = run_in(case)
                for path in checkpoints:
                    load(run.engine, path)
                    run.assert_has(expected)
                found, compared = run.step(), ("actor/loss", "actor/grad_norm", "actor/kl", "actor/lr")
                metric = worst_metric(found, {name: metrics[name] for name in compared})
                differences["metrics"] = max(differences["metrics"], metric)
                differences["weights"] = max(differences["weights"], worst(weights(run), trained))
    return differences


def exchange_all(rank: int, folder: str) -> dict[str, dict[str, float]]:
    """In one go, because starting the ranks takes longer."""
    ranks = Worlds(rank, RANKS, folder)
    return {
        name: exchange(ranks, f"{folder}/model-{name}", Path(folder, name), group) for name, group in GROUPS.items()
    }


def test_any_layout_goes_on_from_any_other(tmp_path: Path) -> None:
    for name, group in GROUPS.items():
        # 128: Megatron-core 0.12 lets buckets overlap if a value head of another size comes before a tied embedding
        make_tiny_model(tmp_path / f"model-{name}", hidden=128, ffn=128, tie=True, **group.model)
    for found in run_ranks(RANKS, exchange_all, str(tmp_path)):
        for name in ("dense", "experts"):
            assert found[name]["metrics"] < LOSS_TOLERANCE, name
            assert found[name]["weights"] < DEEP_WEIGHT_TOLERANCE, name


def change_precision(rank: int, folder: str, root: str) -> None:
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()

    states: dict[str, dict[str, torch.Tensor]] = {}
    path = None
    for bf16, previous in ((True, ""), (False, "bf16"), (True, "fp32")):
        run = Run(device, folder, ONE, bf16=bf16)
        if path is not None:
            load(run.engine, path)
        else:
            run.step(), run.step()
        name = "bf16" if bf16 else "fp32"
        path = save(run.engine, f"{root}/{len(states)}-{name}")
        before, after = states.get(previous, {}), contents(path)
        for key, tensor in after.items() if before else ():
            stored = key.replace(WEIGHTS, "optimizer.main.", 1) if key.startswith(WEIGHTS) else key
            source = before.get(stored, before.get(key.replace("optimizer.main.", WEIGHTS)))
            assert source is not None
            assert torch.equal(tensor, source.to(tensor.dtype)), key
        states[name] = after
        leave_parallel_state()
    assert {tensor.dtype for key, tensor in states["bf16"].items() if key.startswith(WEIGHTS)} == {torch.bfloat16}
    assert not any(key.startswith("optimizer.main.") for key in states["fp32"])


def test_main_weights_survive_a_change_of_precision(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_ranks(1, change_precision, str(tiny_model_dir), str(tmp_path))


def round_trips(rank: int, folder: str, models: dict[str, tuple[str, str]]) -> None:
    ranks = Worlds(rank, RANKS, folder)
    for family, (one, other) in models.items():
        first, second = ROUND_TRIPS["moe" in family or "deepseek" in family]
        path = Path(folder, f"{family}-checkpoint", "iter_0000001")
        with ranks.world(first.world) as here:
            if here:
                save(Run(ranks.device, one, first).engine, path.parent)
        with ranks.world(second.world) as here:
            if here:
                engine = Run(ranks.device, other, second).engine  # other weights: what is not loaded is seen
                load(engine, path)
                stored = HFWeights(one)
                names = set(stored.names)
                for name, tensor in engine.export_weights(1 << 20):
                    assert torch.equal(tensor, stored.tensor(name)), f"{family}: {name}"
                    names.remove(name)
                assert not names, family


def test_every_family_comes_back_from_another_layout(tmp_path: Path) -> None:
    """Hugging Face's folder, a layout, a checkpoint, another layout, and what it exports: bit for bit."""
    families = ("qwen2", "qwen3", "mistral", "smollm", "qwen3_moe", "deepseek_v2")  # the others: see above
    run_ranks(RANKS, round_trips, str(tmp_path), {family: make_models(tmp_path, family) for family in families})
