"""Each algorithm learns single-digit addition from reward alone, with the same seed and budget of steps.

Needs the model and data that `bash examples/quickstart.sh` makes. `python benchmarks/learning.py [ALGORITHM …]`
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from records import Record, cpu_name, publish, train

SEED = 1234
LAST = 10  # steps whose mean reward counts
AIM = 0.85
TWO_UPDATES = "rl_config.mini_batch_size=16"  # a step: the second starts from another policy, so ratios matter
SMALLER = "actor_config.lr=5e-4"  # steps of the optimizer
BY_SEQUENCE = "rl_config.loss_agg_mode=seq-mean-token-mean"
ALGORITHMS: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": ["rl_config.norm_adv_by_std=false", "rl_config.loss_agg_mode=seq-mean-token-sum-norm", TWO_UPDATES],
    # with GRPO's learning rate RLOO came to 0.87 after 240 steps, and lost it again
    "rloo": ["rl_config.adv_estimator=rloo", SMALLER, TWO_UPDATES],
    "reinforce_plus_plus": ["rl_config.adv_estimator=reinforce_plus_plus", SMALLER, TWO_UPDATES],
    "gspo": [
        "rl_config.loss_type=gspo",
        "rl_config.clip_higher_enable=true",
        "rl_config.clip_ratio_low=0.1",
        "rl_config.clip_ratio_high=0.15",
        BY_SEQUENCE,
        TWO_UPDATES,
    ],
    # nothing holds a token back, however far it has moved: one answer would soon be given to everything
    "cispo": ["rl_config.loss_type=cispo", "rl_config.entropy_coeff=0.01", SMALLER, TWO_UPDATES],
    "ppo": [],
    "dapo": [],
}
OWN_CONFIG = ("ppo", "dapo")


def learn(name: str, output: Path, *overrides: str) -> list[float]:
    """Mean reward of every step of a run of an algorithm, which writes to `output`."""
    settings = (f"megatron_training.seed={SEED}", "actor_config.save=null", *ALGORITHMS[name], *overrides)
    config = f"{name if name in OWN_CONFIG else 'grpo'}_trainer_tiny_cpu"
    return [step["reward/mean"] for step in train(config, output, *settings)]


def main() -> None:
    """Run and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithms", nargs="*", default=list(ALGORITHMS), help="names; all if none is given")
    for name in parser.parse_args().algorithms:
        with tempfile.TemporaryDirectory() as folder:
            rewards = learn(name, Path(folder))
        reached = statistics.fmean(rewards[-LAST:])
        note = f"mean of the last {LAST} of {len(rewards)} steps, first {rewards[0]:.3f}, seed {SEED}"
        settings = " ".join(setting.removeprefix("rl_config.") for setting in ALGORITHMS[name])
        record = Record(f"learning.{name}_reward", reached, "", limit=1.0, note=f"{note}; {settings}")
        publish("learning-cpu", [record], cpu_name(), keep_others=True)  # each when it is there: all take an hour


if __name__ == "__main__":
    main()
