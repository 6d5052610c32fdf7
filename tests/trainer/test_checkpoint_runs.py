"""Checkpoints in the whole trainer: asynchronous ones equal others, and another layout goes on from them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import run, training
from tests.trainer.conftest import EVERY
from tests.trainer.test_training_run import SAME_IN_FLOAT32


def assert_profiled(folder: Path) -> None:
    """Of each stage of two steps, on one rank: the update has matrix products, forward and backward."""
    stages = ("resharding", "rollout", "scoring", "update")
    names = {f"step_{step}_rank_1_{stage}.pt.trace.json.gz" for step in (2, 3) for stage in stages}
    assert {path.name for path in folder.iterdir()} == names
    for name in names:
        events = json.loads(gzip.decompress((folder / name).read_bytes()))["traceEvents"]
        operators = {event["name"] for event in events if event.get("cat") == "cpu_op"}
        assert operators, name
        if "update" in name:
            assert {"aten::mm", "MmBackward0"} <= operators or {"aten::mm", "aten::addmm_"} <= operators
            assert any("Input Dims" in event["args"] for event in events if event["name"] == "aten::mm")


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_blocking_stages_and_asynchronous_checkpoints_give_the_same_bits(
    inputs: Path, tmp_path: Path, whole: Any
) -> None:
    root, steps = whole
    profiled = ["profiler.steps=[2,3]", "profiler.ranks=[1]", "profiler.with_shapes=true"]
    found = run(inputs, tmp_path, *EVERY, "rl_config.blocking=true", "actor_config.async_save=true", *profiled)
    assert [training(step) for step in found] == [training(step) for step in steps]
    assert_profiled(tmp_path / "run" / "profile")
    expected, written = files_of(root), files_of(tmp_path / "checkpoints")
    assert sorted(written) == sorted(expected)
    assert [name for name in expected if written[name] != expected[name]] == []
    assert "iter_0000004/hf/model.safetensors" in written


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_config.tensor_model_parallel_size=2",),
        (
            "rl_config.use_integrated_worker=false",
            "rl_config.actor_resource.num_npus=1",
            "rl_config.rollout_resource.num_npus=2",
            "rl_config.blocking=true",
            "generate_config.infer_tensor_parallel_size=2",
            "actor_config.async_save=true",
        ),
    ],
    ids=["TP2-to-TP1", "DP1-apart-from-TP2"],
)
def test_another_layout_goes_on(overrides: tuple[str, ...], inputs: Path, tmp_path: Path, whole: Any) -> None:
    root, steps = whole
    (found,) = run(inputs, tmp_path, *EVERY, *overrides, f"actor_config.load={root / 'iter_0000003'}")
    (expected,) = steps[3:]
    assert found["step"] == 4
    for name, value in training(expected).items():
        if name.split("/")[0] not in ("actor", "rollout"):
            assert found[name] == value, name  # the same tokens were sampled
    for name in ("actor/loss", "actor/pg_loss", "actor/kl", "actor/entropy", "actor/grad_norm", "actor/lr"):
        assert found[name] == pytest.approx(expected[name], abs=SAME_IN_FLOAT32, rel=SAME_IN_FLOAT32), name
