"""Convert a run configuration: `python cli/migrate_config.py --from verl --input theirs.yaml --output run.yaml`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed_rl.common.command_line import run_command
from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.migration import PROJECTS, Left, migrate


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = argparse.ArgumentParser(prog="migrate_config", description=__doc__)
    parser.add_argument("--from", dest="project", required=True, choices=PROJECTS, help="whose configuration it is")
    parser.add_argument("--input", metavar="FILE", help="their YAML; without it there are only overrides")
    parser.add_argument("--output", metavar="FILE", help="write ours there; without it, it is printed")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if anything is left to do")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as on their command lines, in their keys")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 with --strict where something is left, else that of the error."""
    args = build_parser().parse_intermixed_args(argv)
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        text = Path(args.input).read_text(encoding="utf-8") if args.input else ""
    except UnicodeDecodeError as error:
        raise ConfigError([Violation("--input", args.input, f"is not UTF-8 text: {error.reason}")]) from error
    found = migrate(args.project, text, args.overrides)
    if args.output:
        Path(args.output).write_text(found.to_yaml(), encoding="utf-8")
    else:
        print(found.to_yaml(), end="")
    lists: dict[str, Sequence[Left | Violation]] = {
        f"{len(found.left)} of their keys have no counterpart, or need a decision:": found.left,
        f"{len(found.violations)} keys of ours are missing or wrong:": found.violations,
    }
    for title, items in lists.items():
        if items:
            print("\n".join([title, *(f"  - {item}" for item in items)]), file=sys.stderr)
    return int(args.strict and any(lists.values()))


if __name__ == "__main__":
    sys.exit(main())
