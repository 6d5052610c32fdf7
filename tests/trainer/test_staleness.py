"""Generation beside training, as a user runs it: overlap, bounded staleness, learning, resuming, and failing."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.workers.stages import dock_spec
from tests.support.runs import command, run, spans, started

STEPS, SAVED = 12, 6
STALE = (
    "rl_config.use_integrated_worker=false",
    "rl_config.actor_resource.num_npus=1",
    "rl_config.rollout_resource.num_npus=1",
    "rl_config.staleness=1",
    "rl_config.sample_log_interval=1",
    "actor_config.lr=3e-3",
    f"megatron_training.save_interval={SAVED}",
    "generate_config.max_num_seqs=8",  # few at once: generation takes long enough to be seen beside training
)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_dock_is_told_the_bound(staleness: int) -> None:
    config, _ = load_config("grpo_trainer_tiny_cpu", [*STALE, f"rl_config.staleness={staleness}"])
    consumers = dock_spec(config, derive_layout(config)).consumers
    assert consumers["rollout"].max_staleness == staleness


@pytest.fixture(scope="module")
def stale(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("stale")
    return folder, run(inputs, folder, *STALE, "trace=true", f"megatron_training.train_iters={STEPS}")


def test_generation_runs_beside_training_on_older_samples(stale: tuple[Path, list[dict[str, Any]]]) -> None:
    found = spans(stale[0] / "run")
    rollouts = {span["args"]["step"]: span for span in found if span["name"] == "rollout" and span["cat"] == "stage"}
    assert sorted(rollouts) == list(range(1, STEPS + 1))
    assert {span["process"] for span in rollouts.values()} == {"rank 1"}
    updates = [span for span in found if span["name"] == "update" and span["cat"] == "stage"]
    assert {span["process"] for span in updates} == {"rank 0"}
    # without staleness none begins before; how long they run beside each other, the machine decides
    ends = {update["args"]["step"]: update["ts"] + update["dur"] for update in updates}
    assert any(rollouts[step + 1]["ts"] < end for step, end in ends.items() if step < STEPS)


def test_staleness_is_what_was_asked_for(stale: tuple[Path, list[dict[str, Any]]]) -> None:
    """The first iteration has the weights it trains; from then on generation is one step ahead."""
    assert [step["staleness/max"] for step in stale[1]] == [0] + [1] * (STEPS - 1)
    assert [step["staleness/mean"] for step in stale[1]] == [0] + [1] * (STEPS - 1)
    # log-probs are those of the policy that sampled: the policy being trained has moved on, and tokens are weighted
    assert stale[1][0]["rollout/logprob_diff_max"] < 1e-5 < 1e-3 < stale[1][-1]["rollout/logprob_diff_max"]
    assert stale[1][0]["rollout/is_weight"] == 1
    assert stale[1][-1]["rollout/is_weight"] != 1


def test_it_learns_from_older_samples(stale: tuple[Path, list[dict[str, Any]]]) -> None:
    rewards = [step["reward/mean"] for step in stale[1]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.02, rewards


def test_a_checkpoint_is_of_what_was_trained_not_of_what_was_generated(
    inputs: Path, stale: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Prompts that were answered but not trained on are drawn again, and answered by the newest weights."""
    folder, _ = stale
    (state,) = (folder / "checkpoints").glob(f"iter_*{SAVED}/trainer.json")
    saved = json.loads(state.read_text())
    assert (saved["iteration"], saved["sampler"]["used"]) == (SAVED, SAVED * 8)
    arguments = (*STALE, f"actor_config.load={state.parent}", f"megatron_training.train_iters={SAVED + 2}")
    steps = run(inputs, folder, *arguments, "actor_config.save=null", name="on")
    assert [step["step"] for step in steps] == [SAVED + 1, SAVED + 2]
    assert [step["staleness/max"] for step in steps] == [0, 1]
    assert not (folder / "on" / "trace.json").exists()  # it was not asked for
    assert prompts(folder / "on", SAVED + 1) == prompts(folder / "run", SAVED + 1)
    assert prompts(folder / "on", SAVED + 2) == prompts(folder / "run", SAVED + 2)


def prompts(folder: Path, step: int) -> list[str]:
    """Prompts of the samples that were logged for a step."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    found = [row["prompt"] for row in rows if row["step"] == step]
    assert found
    return found


def test_a_killed_rollout_worker_ends_the_run(inputs: Path, tmp_path: Path) -> None:
    arguments = command(inputs, tmp_path, *STALE, "megatron_training.train_iters=1000", "trace=true", "run_name=run")
    with started(arguments, until=(tmp_path / "run" / "metrics.jsonl").exists) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        (rollout,) = [child for child in children if "RolloutWorker" in " ".join(child.cmdline())]
        os.kill(rollout.pid, signal.SIGKILL)
        killed = time.monotonic()
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - killed < 60
    assert process.returncode == 3, stderr[-2000:]
    assert re.search(r"worker rank 1 failed in stage 'rollout' at step \d+: its process died", stderr), stderr[-2000:]
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {span["args"]["step"] for span in spans(tmp_path / "run")} >= set(range(1, len(steps) + 1))
