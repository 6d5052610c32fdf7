"""Rollout ahead of training on the CPU example: seconds a step, and how much of training rollout overlaps.

One device trains, one generates, for `staleness` 0, 1 and 2; the same number of steps of the same run otherwise.
Needs the model and data that `bash examples/quickstart.sh` makes. `python benchmarks/staleness.py`
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from records import Record, cpu_name, publish, train

STEPS = 150
WARM_UP = 10  # steps that are left out of the times
SETTINGS = (
    "rl_config.use_integrated_worker=false",
    "+rl_config.rollout_resource={num_npus: 1}",
    "rl_config.actor_resource.num_npus=1",
    f"megatron_training.train_iters={STEPS}",
    "rl_config.use_tensorboard=false",
    "trace=true",
)


def overlap(spans: list[dict[str, Any]]) -> float:
    """Share of the time of all updates during which some rollout runs."""
    stages = [span for span in spans if span.get("cat") == "stage"]
    updates = [(s["ts"], s["ts"] + s["dur"]) for s in stages if s["name"] == "update"]
    rollouts = [(s["ts"], s["ts"] + s["dur"]) for s in stages if s["name"] == "rollout"]
    shared = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in updates for b in rollouts)
    return shared / sum(end - start for start, end in updates)


def main() -> None:
    """Run and publish."""
    records: list[Record] = []
    synchronous = 0.0
    for staleness in (0, 1, 2):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder)
            settings = (*SETTINGS, f"actor_config.save={output}/save", f"rl_config.staleness={staleness}")
            steps = train("grpo_trainer_tiny_cpu", output, *settings)
            trace = json.loads((output / "run" / "trace.json").read_text())
        seconds = statistics.median(step["timing/all"] for step in steps[WARM_UP:])
        synchronous = synchronous or seconds
        spans = trace["traceEvents"] if isinstance(trace, dict) else trace
        reward = statistics.fmean(step["reward/mean"] for step in steps[-10:])
        note = f"staleness {staleness}, 1 device trains and 1 generates, {STEPS} steps"
        records += [
            Record("staleness.step_s", seconds, "s", note=f"median, {note}"),
            Record("staleness.speedup", synchronous / seconds, "x", limit=2.0, note=f"{note}, against staleness 0"),
            Record("staleness.overlap", overlap(spans), "", limit=1.0, note=f"of update time with rollout; {note}"),
            Record("staleness.reward_last", reward, "", limit=1.0, note=f"mean of the last 10 steps, {note}"),
        ]
    publish("staleness-cpu", records, cpu_name())


if __name__ == "__main__":
    main()
