"""Train with GRPO: `python cli/train_grpo.py --config-name grpo_trainer_qwen25_7b [key=value ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed_rl.common.command_line import config_parser, run_command


def build_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Arguments of all training commands."""
    parser = config_parser(name, description)
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration and exit")
    parser.add_argument("--dry-run", action="store_true", help="validate, print layout and memory estimate, and exit")
    parser.add_argument("--trace", action="store_true", help="write a timeline of all stages: sets trace=true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a wrong configuration, else that of the error."""
    return train("train_grpo", "Post-train a language model with GRPO.", "ray_grpo", argv)


def train(name: str, description: str, stage: str, argv: Sequence[str] | None = None) -> int:
    """Run the training command `name`, for configurations of one `stage`; returns the exit code."""
    args = build_parser(name, description).parse_intermixed_args(argv)
    return run_command(lambda: _run(args, stage))


def _run(args: argparse.Namespace, stage: str) -> int:
    from mindspeed_rl.common.errors import ConfigError, Violation
    from mindspeed_rl.config.compose import compose_yaml, load_config
    from mindspeed_rl.config.files import actor_path

    if args.trace:
        args.overrides.append("trace=true")
    if args.cfg:  # printed before it is validated: what does not validate is what one wants to look at
        print(compose_yaml(args.config_name, args.overrides, args.config_dir), end="")
    previewed = bool(args.cfg) or args.dry_run
    cfg, resolved_yaml = load_config(args.config_name, args.overrides, args.config_dir, files_exist=not previewed)
    if cfg.actor.stage != stage:
        message, hint = (
            f"this command trains stage: {stage}",
            f"use cli/train_{cfg.actor.stage.removeprefix('ray_')}.py",
        )
        raise ConfigError([Violation(actor_path(cfg, "stage"), cfg.actor.stage, message, hint)])
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
