"""The tiny run from reward alone: first and last reward, time by stage, rollout against training log-probs.

Needs the model and data that `bash examples/quickstart.sh` makes. `python benchmarks/quickstart.py`
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from records import Record, cpu_name, publish, train

LAST = 10  # steps whose mean is the last reward: one step's 32 prompts are noisy


def main() -> None:
    """Run and publish."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        steps = train("grpo_trainer_tiny_cpu", Path(folder), f"actor_config.save={folder}/checkpoints")
    minutes = (time.monotonic() - start) / 60
    rewards = [step["reward/mean"] for step in steps]
    records = [
        Record("quickstart.reward_first", rewards[0], "", limit=1.0, note="step 1"),
        Record(
            "quickstart.reward_last", statistics.mean(rewards[-LAST:]), "", 1.0, note=f"mean of the last {LAST} steps"
        ),
        Record("quickstart.minutes", minutes, "min", note=f"{len(steps)} steps, start-up included"),
        Record(
            "parity.max_logprob_diff",
            max(step["rollout/logprob_diff_max"] for step in steps),
            "nat",
            limit=0.0,
            note="largest |training − rollout log-prob| of any token of the run, float32",
        ),
    ]
    for name in sorted(name for name in steps[-1] if name.startswith("timing/")):
        seconds = statistics.median(step.get(name, 0.0) for step in steps)
        records.append(Record(f"quickstart.{name}", seconds, "s", note="median step"))
    publish("quickstart-cpu", records, cpu_name())


if __name__ == "__main__":
    main()
