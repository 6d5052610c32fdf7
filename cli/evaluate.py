"""Evaluate a model, or responses in a file: `python cli/evaluate.py --config-name … [--responses FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli.train_grpo import add_previews, load_previewed, preview
from mindspeed_rl.common.command_line import config_parser, run_command


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = config_parser("evaluate", __doc__)
    add_previews(parser)
    parser.add_argument(
        "--responses",
        metavar="FILE",
        help="jsonl or parquet with responses to score; without it they are generated",
    )
    parser.add_argument(
        "--response-key", default="responses", help="its column: a text, or a list of them (default: %(default)s)"
    )
    parser.add_argument("--output", metavar="FOLDER", help="write metrics.json and responses.parquet there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a wrong configuration, else that of the error."""
    args = build_parser().parse_intermixed_args(argv)
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mindspeed_rl.config.rules_supervised import needs_rollout

    generates = args.responses is None
    # a validation before the first iteration, and nothing after it
    args.overrides.append("rl_config.val_before_train=true")
    if not generates:  # they are what is validated on
        args.overrides.append(f"megatron_training.val_data_path={json.dumps(args.responses, ensure_ascii=False)}")
    cfg, resolved_yaml = load_previewed(args, needs_files=generates)
    needs_rollout(cfg, "cli/evaluate.py")
    if preview(args, cfg):
        return 0
    from mindspeed_rl.trainer.evaluate import evaluate_file, evaluate_model, print_metrics, write_results

    if generates:
        metrics, rows = evaluate_model(cfg, resolved_yaml, args.config_name)
    else:
        metrics, rows = evaluate_file(cfg, args.responses, args.response_key)
    print_metrics(metrics, Console(width=None if sys.stdout.isatty() else 200))
    if args.output:
        write_results(Path(args.output), metrics, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
