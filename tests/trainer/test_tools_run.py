"""Tools in the whole trainer: a tiny model answers sums of large numbers with a calculator."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.make_tool_model import make_tool_model, sums
from tests.support.forked import ROOT, run_forked

STEPS = 200  # of supervised learning
PROMPTS, GROUP = 8, 2

HANGS_ONCE = """
import threading
from mindspeed_rl.tools.calculator import calculate
from mindspeed_rl.tools.registry import register_tool

calls = []

@register_tool("calculator", "adds, but for the first call, which never ends", {"expression": {"type": "string"}})
def add(expression):
    calls.append(expression)
    if len(calls) == 1:
        threading.Event().wait()
    return calculate(expression)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    make_tool_model(folder / "model", STEPS)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(64, 0)))
    (folder / "tools.py").write_text(HANGS_ONCE)
    return folder


def run(inputs: Path, output: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics of every step, and samples."""
    arguments = [
        "--config-name=grpo_trainer_tiny_cpu_tools",
        f"output_dir={output}",
        "run_name=run",
        f"megatron_training.data_path={inputs}/sums.jsonl",
        f"megatron_training.tokenizer_name_or_path={inputs}/model",
        "megatron_training.train_iters=2",
        f"megatron_training.global_batch_size={PROMPTS}",
        f"actor_config.load={inputs}/model",
        "actor_config.save=null",
        f"rl_config.mini_batch_size={PROMPTS}",
        f"rl_config.n_samples_per_prompt={GROUP}",
        f"rl_config.custom_reward_function.path={ROOT}/examples/number_reward.py",
        *overrides,
    ]
    said = output / "said.txt"
    assert run_forked("train_grpo", arguments, said) == 0, said.read_text()[-6000:]
    read = [(output / "run" / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")]
    metrics, samples = ([json.loads(line) for line in text.splitlines()] for text in read)
    return metrics, samples


def test_large_sums_are_right_with_a_calculator_that_may_hang_once(inputs: Path, tmp_path: Path) -> None:
    """Two ranks of one engine: the leader's calls are all there are, so one sample alone lacks an answer."""
    tools = [f"tools_config.tool_file={inputs}/tools.py", "tools_config.tool_timeout=1"]
    steps, _ = run(inputs, tmp_path, "generate_config.infer_tensor_parallel_size=2", *tools)
    samples = PROMPTS * GROUP
    assert steps[0]["tools/timed_out"] == pytest.approx(1 / samples)
    assert steps[1]["tools/timed_out"] == 0
    for step in steps:
        assert step["tools/calls"] > 0.9
        assert step["tools/turns_max"] >= 2
        assert step["tools/tokens"] > 4
        assert step["rollout/logprob_diff_max"] < 1e-4, "training sees the tokens that rollout did"
        assert step["reward/mean"] >= 0.75


def test_without_it_they_are_wrong(inputs: Path, tmp_path: Path) -> None:
    off = ["~tools_config", "rl_config.actor_resource.num_npus=1", "megatron_training.train_iters=1"]
    steps, _ = run(inputs, tmp_path, *off)
    assert all(step["reward/mean"] < 0.1 for step in steps)
    assert "tools/calls" not in steps[0]
