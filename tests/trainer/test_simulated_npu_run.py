"""The whole trainer with `device: npu`, on the simulated one: a GRPO iteration, without a call to CUDA of ours."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import command, training
from tests.support.simulated_npu import environment

SAME_IN_FLOAT32 = 2e-5  # other kernels, or another order of summation


def test_an_iteration_on_npus_trains_what_one_on_cpus_does(
    inputs: Path, streaming: list[dict[str, Any]], tmp_path: Path
) -> None:
    report = tmp_path / "uses_of_cuda"
    offload = [f"generate_config.offload_train_{part}=true" for part in ("param", "grad", "optimizer")]
    settings = ("device=npu", "megatron_training.train_iters=1", "run_name=run", *offload)
    done = subprocess.run(
        command(inputs, tmp_path, *settings),
        env=environment(2, SIMULATED_NPU_REPORT=str(report)),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (step,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    for name, value in training(streaming[0]).items():
        if name.split("/")[0] in ("actor", "rollout"):
            assert step[name] == pytest.approx(value, abs=SAME_IN_FLOAT32, rel=SAME_IN_FLOAT32), name
        else:
            assert step[name] == value, name  # the same tokens were sampled
    assert "npu of 1 visible" in (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
    uses = report.read_text().splitlines()
    assert [use for use in uses if not use.startswith("megatron ")] == []
    for what in ("torch.cuda.current_device", "device 'cuda'"):  # uses are seen where there are any
        assert any(use.endswith(what) for use in uses), what
