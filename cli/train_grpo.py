"""Train with GRPO: `python cli/train_grpo.py --config-name grpo_trainer_qwen25_7b [key=value ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed_rl.common.command_line import config_parser, run_command

if TYPE_CHECKING:
    from mindspeed_rl.config.schema import Config


COMMANDS = {
    "ray_grpo": "train_grpo",
    "ray_dapo": "train_dapo",
    "ray_ppo": "train_ppo",
    "sft": "train_sft",
    "dpo": "train_dpo",
}  # the configuration's stage -> command


def build_parser(stage: str) -> argparse.ArgumentParser:
    """Arguments of all training commands."""
    name = stage.removeprefix("ray_").upper()
    parser = config_parser(COMMANDS[stage], f"Post-train a language model with {name}.")
    add_previews(parser)
    parser.add_argument("--trace", action="store_true", help="write a timeline of all stages: sets trace=true")
    return parser


def add_previews(parser: argparse.ArgumentParser) -> None:
    """Arguments that show what would run."""
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration and exit")
    parser.add_argument("--dry-run", action="store_true", help="validate, print layout and memory estimate, and exit")


def main(argv: Sequence[str] | None = None, stage: str = "ray_grpo") -> int:
    """Run the command; returns the exit code: 0, 2 for a wrong configuration, else that of the error.

    stage: what the configuration must say that it is for.
    """
    args = build_parser(stage).parse_intermixed_args(argv)
    return run_command(lambda: _run(args, stage))


def _run(args: argparse.Namespace, stage: str) -> int:
    if args.trace:
        args.overrides.append("trace=true")
    cfg, resolved_yaml = load_previewed(args)
    _check_stage(cfg, stage)
    if preview(args, cfg):
        return 0
    # Ray and torch are imported here, after everything about the configuration is known to be right
    from mindspeed_rl.trainer.launch import run

    return run(cfg, resolved_yaml, args.config_name)


def load_previewed(args: argparse.Namespace, needs_files: bool = True) -> tuple[Config, str]:
    """The configuration and its YAML text, which `--cfg` prints; files must exist if they are needed and it runs."""
    from mindspeed_rl.config.compose import compose_yaml, load_config

    if args.cfg:  # printed before it is validated: what does not validate is what one wants to look at
        print(compose_yaml(args.config_name, args.overrides, args.config_dir), end="")
    files_exist = needs_files and not (args.cfg or args.dry_run)
    return load_config(args.config_name, args.overrides, args.config_dir, files_exist=files_exist)


def preview(args: argparse.Namespace, cfg: Config) -> bool:
    """Print what `--dry-run` promises; whether that, or the configuration, was all that was asked for."""
    if args.dry_run:
        from rich.console import Console

        from mindspeed_rl.config.report import print_report

        print_report(cfg, Console(stderr=bool(args.cfg)))  # keeps the YAML on stdout clean
    return bool(args.cfg) or args.dry_run


def _check_stage(cfg: Config, stage: str) -> None:
    """Methods differ by their keys, not by their command: one with the configuration of another is a mistake."""
    from mindspeed_rl.common.errors import ConfigError, Violation
    from mindspeed_rl.config.files import actor_path

    if cfg.actor.stage != stage:
        message = f"is for cli/{COMMANDS[cfg.actor.stage]}.py, not for cli/{COMMANDS[stage]}.py"
        hint = f"use that command, or set megatron_training.stage={stage}"
        raise ConfigError([Violation(actor_path(cfg, "stage"), cfg.actor.stage, message, hint)])


if __name__ == "__main__":
    sys.exit(main())
