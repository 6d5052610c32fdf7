"""Make pairs for DPO of a file of prompts and answers: each right answer beside a wrong one.

python examples/make_preferences.py --data examples/data/addition.jsonl --output examples/data/preferences.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path


def make_preferences(data: Path, seed: int = 0) -> list[dict[str, str]]:
    """Rows with `prompt`, `chosen` and `rejected`: the answer, and that of another row which differs."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    answers, rng = sorted({row["answer"] for row in rows}), random.Random(seed)
    return [
        {
            "prompt": row["prompt"],
            "chosen": row["answer"],
            "rejected": rng.choice([answer for answer in answers if answer != row["answer"]]),
        }
        for row in rows
    ]


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=Path, help="jsonl file with prompt and answer")
    parser.add_argument("--output", required=True, type=Path, help="file to write")
    args = parser.parse_args()
    rows = make_preferences(args.data)
    args.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{args.output}: {len(rows)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
