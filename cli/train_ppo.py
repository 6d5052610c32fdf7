"""Train with PPO, a critic beside the actor: `python cli/train_ppo.py --config-name ppo_trainer_tiny_cpu`.

The same trainer as `train_grpo.py`, for configurations whose `stage` is `ray_ppo`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli.train_grpo import train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, as `train_grpo`."""
    return train("train_ppo", "Post-train a language model with PPO.", "ray_ppo", argv)


if __name__ == "__main__":
    sys.exit(main())
