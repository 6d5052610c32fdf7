"""Write tasks of reasoning-gym as a jsonl data set: `python cli/make_data.py --task chain_sum --output sums.jsonl`.

Rows have `prompt`, `answer`, `data_source` and, for the verifier `reasoning_gym`, the task's entry in `extra`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml

from mindspeed_rl.common.command_line import run_command
from mindspeed_rl.common.errors import DataError
from mindspeed_rl.common.files import replacing
from mindspeed_rl.data.tasks import TaskOptions, generate_rows


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = argparse.ArgumentParser(prog="make_data", description=__doc__)
    parser.add_argument("--task", required=True, help="name of a reasoning-gym data set, such as chain_sum")
    parser.add_argument("--output", required=True, type=Path, help="jsonl file to write")
    parser.add_argument("--size", type=int, default=1000, help="entries to draw, before filters (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generator (default 0)")
    parser.add_argument("--config", nargs="*", default=[], metavar="key=value", help="settings of the task, as YAML")
    parser.add_argument("--prompt-template", default="{question}", help="may use names of the entry's metadata")
    parser.add_argument("--answer-pattern", help="keep entries whose whole answer matches this regular expression")
    parser.add_argument("--dedupe", action="store_true", help="keep the first of rows with equal prompts")
    parser.add_argument("--strip-spaces", action="store_true", help="remove all white space from prompts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: _make_data(args))


def _make_data(args: argparse.Namespace) -> int:
    options = TaskOptions(
        task=args.task,
        size=args.size,
        seed=args.seed,
        config=dict(_setting(text) for text in args.config),
        prompt_template=args.prompt_template,
        answer_pattern=args.answer_pattern,
        dedupe=args.dedupe,
        strip_spaces=args.strip_spaces,
    )
    result = generate_rows(options)
    with replacing(args.output) as unfinished, unfinished.open("w", encoding="utf-8") as lines:
        for row in result.rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    dropped = ", ".join(f"{count} for {reason}" for reason, count in result.dropped.items() if count)
    print(f"{args.output}: {len(result.rows)} rows" + (f" ({dropped} dropped)" if dropped else ""))
    return 0


def _setting(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise DataError(f"--config {text!r}: must be key=value")
    if key in ("size", "seed"):
        raise DataError(f"--config {text!r}: is no setting of a task, write --{key} {value}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise DataError(f"--config {text!r}: the value is not valid YAML") from error


if __name__ == "__main__":
    sys.exit(main())
