"""Checkpoints of every layout loaded into every other one: the same state bit for bit, and training goes on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import load, save
from support.ranks import run_ranks
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
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.types import Denominators

RANKS = 4
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LOCAL = {"use_distributed_optimizer": False}
ONE = layout(1)
DENSE = [
    ONE,
    layout(2),
    layout(3, **LOCAL),
    layout(4, **OVERLAP),
    layout(2, **{TP: 2}),
    layout(4, **{TP: 2}, sequence_parallel=True),
    layout(4, **{TP: 2}, **LOCAL),
    layout(2, **{PP: 2}),
    layout(4, **{PP: 2, VPP: 1}, **OVERLAP),
    layout(2, **{PP: 2}, num_layer_list="3,1"),
    layout(4, **{PP: 2}, noop_layers="1,3", **LOCAL),
    layout(4, **{TP: 2, PP: 2}),
    layout(4, context_parallel_size=2),
]
EXPERTS = [
    ONE,
    layout(3),
    layout(2, **{EP: 2}),
    layout(2, **{EP: 2}, **LOCAL),
    layout(4, **{EP: 2}),
    layout(4, **{EP: 4}, **LOCAL),
    layout(4, **{EP: 2, TP: 2}, sequence_parallel=True),
    layout(4, **{EP: 2, PP: 2}),
]


class Ranks:
    """Worlds of different sizes, one after the other, in the same processes."""

    def __init__(self, rank: int, root: str):
        from mindspeed_rl.device.select import make_device

        self.rank, self.root, self.number = rank, root, 0
        self.device = make_device("cpu")
        self.device.install()
        self.store = dist.FileStore(f"{root}/meeting", RANKS)
        dist.destroy_process_group()

    @contextmanager
    def world(self, size: int) -> Iterator[bool]:
        """Whether this rank takes part; ends when all of the world have ended it."""
        from megatron.core import parallel_state as mpu

        self.number += 1
        if self.rank < size:
            method = f"file://{self.root}/world{self.number}"
            dist.init_process_group("gloo", init_method=method, rank=self.rank, world_size=size)
        yield self.rank < size
        if self.rank < size:
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
        if self.store.add(f"ended{self.number}", 1) == RANKS:
            self.store.set(f"next{self.number}", "1")
        self.store.wait([f"next{self.number}"])


class Run:
    """An engine in a layout."""

    def __init__(self, device: Any, folder: str, layout: Layout, **settings: Any):
        from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

        model = ModelConfig.from_hf(json.loads(Path(folder, "config.json").read_text()))
        cfg = MegatronConfig(**{"lr": 1e-3, "lr_warmup_fraction": 0.5, **layout.settings, **settings})
        initialize_parallel_state(cfg)
        self.engine = MegatronEngine(cfg, model, device, 10, HFWeights(folder), with_reference=False)

    def step(self) -> dict[str, float]:
        """Train on a batch that ranks share as evenly as they can; metrics of the whole, on output ranks."""
        engine, batch = self.engine, make_batch()
        mine = batch.select(range(engine.data_parallel_rank, SEQUENCES, engine.data_parallel_size))
        tokens = float(torch.cat(batch.columns["loss_mask"]).sum())
        loss = objective_loss(PolicyObjective(RLConfig(entropy_coeff=0.01)), Denominators(tokens, SEQUENCES - 1))
        passes = [[index] for index in range(len(mine))]
        found = engine.train_mini_batch(mine, loss, passes, TEMPERATURE, entropy=True).finalize()
        loss_here = [found["actor/loss"] if engine.is_output_rank else 0.0]
        return {**found, "loss": engine.sum_over_data_parallel(loss_here)[0]}

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


def exchange(rank: int, folder: str, root: str, layouts: list[Layout], settings: dict[str, Any]) -> dict[str, float]:
    """Train two steps on one rank, hand the state through all pairs of layouts, go on in each; what came of it."""
    ranks = Ranks(rank, root)
    first = Path(root, "first")
    with ranks.world(1) as here:
        if here:
            run = Run(ranks.device, folder, ONE, **settings)
            run.step(), run.step()
            save(run.engine, first)
            expected_step = run.step()
            trained = dict(run.engine.export_weights(1 << 20))
            torch.save((expected_step, {name: tensor.clone() for name, tensor in trained.items()}), f"{root}/trained")
    expected = contents(first / "iter_0000001")
    assert any(name.startswith("optimizer.exp_avg_sq.") and tensor.any() for name, tensor in expected.items())
    expected_step, trained = torch.load(f"{root}/trained")
    checkpoints = [first / "iter_0000001"]
    for number, case in enumerate(layouts):
        with ranks.world(case.world) as here:
            if here:
                run = Run(ranks.device, folder, case, **settings)
                load(run.engine, checkpoints[0])
                run.assert_has(expected)
                save(run.engine, Path(root, str(number)))
        checkpoints.append(Path(root, str(number), "iter_0000001"))
    worst = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}
    for case in layouts:
        with ranks.world(case.world) as here:
            if not here:
                continue
            run = Run(ranks.device, folder, case, **settings)
            for path in checkpoints:
                load(run.engine, path)
                run.assert_has(expected)
            found = run.step()
            if run.engine.is_output_rank:
                norm = found["actor/grad_norm"] - expected_step["actor/grad_norm"]
                worst["grad_norm"] = max(worst["grad_norm"], abs(norm))
                worst["loss"] = max(worst["loss"], abs(found["loss"] - expected_step["loss"]))
            for name, tensor in run.engine.export_weights(1 << 20):
                difference = (tensor - trained[name]).abs().max().item()
                worst["weights"] = max(worst["weights"], difference)
    return worst


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_any_layout_goes_on_from_any_other(kind: str, tmp_path: Path) -> None:
    architecture, layouts = {"dense": ("qwen2", DENSE), "experts": ("qwen3_moe", EXPERTS)}[kind]
    folder = make_tiny_model(tmp_path / "model", architecture, hidden=64, ffn=128, layers=4, tie=True)
    (tmp_path / "root").mkdir()
    for found in run_ranks(RANKS, exchange, str(folder), str(tmp_path / "root"), layouts, {}):
        assert found["loss"] < LOSS_TOLERANCE
        assert found["grad_norm"] < LOSS_TOLERANCE
        assert found["weights"] < DEEP_WEIGHT_TOLERANCE


def test_any_layout_goes_on_from_any_other_in_bfloat16(tmp_path: Path) -> None:
    """State only: gradients of bfloat16 differ too much between layouts to be compared."""
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", hidden=64, layers=2, tie=True)
    (tmp_path / "root").mkdir()
    layouts = [case for case in EXPERTS if case.world != 3]
    run_ranks(RANKS, exchange, str(folder), str(tmp_path / "root"), layouts, {"bf16": True})


def change_precision(rank: int, folder: str, root: str) -> None:
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from megatron.core import parallel_state as mpu

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
        mpu.destroy_model_parallel()
    assert {tensor.dtype for key, tensor in states["bf16"].items() if key.startswith(WEIGHTS)} == {torch.bfloat16}
    assert not any(key.startswith("optimizer.main.") for key in states["fp32"])


def test_main_weights_survive_a_change_of_precision(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_ranks(1, change_precision, str(tiny_model_dir), str(tmp_path))
