"""Train with DPO: `python cli/train_dpo.py --config-name dpo_tiny_cpu [key=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import train_grpo


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a wrong configuration, else that of the error."""
    return train_grpo.main(argv, stage="dpo")


if __name__ == "__main__":
    sys.exit(main())
