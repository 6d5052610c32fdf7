"""Train with GRPO: `python cli/train_grpo.py --config-name grpo_trainer_qwen25_7b [key=value ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed_rl.common.command_line import config_parser, run_command


def build_parser() -> argparse.ArgumentParser:
    """Arguments of all training commands."""
    parser = config_parser("train_grpo", "Post-train a language model with GRPO.")
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration and exit")
    parser.add_argument("--dry-run", action="store_true", help="validate, print layout and memory estimate, and exit")
    parser.add_argument("--trace", action="store_true", help="write a timeline of all stages: sets trace=true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a wrong configuration, else that of the error."""
    args = build_parser().parse_intermixed_args(argv)
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from mindspeed_rl.config.compose import compose_yaml, load_config

    if args.trace:
        args.overrides.append("trace=true")
    if args.cfg:  # printed before it is validated: what does not validate is what one wants to look at
        print(compose_yaml(args.config_name, args.overrides, args.config_dir), end="")
    previewed = bool(args.cfg) or args.dry_run
    cfg, resolved_yaml = load_config(args.config_name, args.overrides, args.config_dir, files_exist=not previewed)
    if args.dry_run:
        from rich.console import Console

        from mindspeed_rl.config.report import print_report

        print_report(cfg, Console(stderr=bool(args.cfg)))  # keeps the YAML on stdout clean
    if previewed:
        return 0
    # Ray and torch are imported here, after everything about the configuration is known to be right
    from mindspeed_rl.trainer.launch import run

    return run(cfg, resolved_yaml, args.config_name)


if __name__ == "__main__":
    sys.exit(main())
