"""Rollout on devices of its own, in turn with training and beside it, as a user runs it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.metrics.names import METRICS
from tests.support.runs import run, spans, training

SEPARATE = (
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
)
ONE_DEVICE = "rl_config.actor_resource.num_npus=1"


def test_rollout_apart_trains_the_same_bit_for_bit(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # one rank alone would get two: products of matrices round differently
    common = (ONE_DEVICE, "rl_config.rollout_is=all", "trace=true", "generate_config.validate_weight=true")
    together = run(inputs, tmp_path, *common, name="together")
    apart = run(inputs, tmp_path, *common, *SEPARATE, name="apart")
    assert [training(step) for step in apart] == [training(step) for step in together]
    assert apart[0]["timing/export_weights"] > 0
    assert all(step["timing/validate_weight"] > 0 for step in (*together, *apart))
    assert apart[0]["rollout/is_weight"] == pytest.approx(1, abs=1e-5)  # both engines compute the same policy
    check_trace(spans(tmp_path / "together"), together, ranks=1)
    check_trace(spans(tmp_path / "apart"), apart, ranks=2)


def check_trace(found: list[dict[str, Any]], steps: list[dict[str, Any]], ranks: int) -> None:
    """One thing at a time in every thread, and sums that are the timing metrics."""
    assert {event["process"] for event in found} == {"driver", "reward worker", *(f"rank {n}" for n in range(ranks))}
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in found:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread in threads.values():
        for before, after in pairwise(thread):
            assert before["ts"] + before["dur"] <= after["ts"] + 1, (before, after)  # microseconds, rounded
    timings = [name.removeprefix("timing/") for name in METRICS if name.startswith("timing/")]
    for step in steps:
        for stage in timings:
            by_process: dict[str, float] = {}
            for event in found:
                if event["name"] == stage and event["cat"] == "stage" and event["args"]["step"] == step["step"]:
                    by_process[event["process"]] = by_process.get(event["process"], 0.0) + event["dur"] / 1e6
            assert step.get(f"timing/{stage}", 0.0) == pytest.approx(max(by_process.values(), default=0.0)), stage
