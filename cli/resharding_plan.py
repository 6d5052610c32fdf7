"""What moves when weights go from training to rollout: `python cli/resharding_plan.py --config-name … [--rank 0]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed_rl.common.command_line import config_parser, run_command


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = config_parser("resharding_plan", __doc__)
    parser.add_argument("--rank", type=int, action="append", help="whose part to show, repeatable; default: all")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a wrong configuration, else that of the error."""
    args = build_parser().parse_intermixed_args(argv)
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from mindspeed_rl.common.errors import ConfigError, Violation
    from mindspeed_rl.config.compose import load_config
    from mindspeed_rl.config.files import resolve_model
    from mindspeed_rl.config.layout import derive_layout
    from mindspeed_rl.config.rules_supervised import needs_rollout
    from mindspeed_rl.resharding.layout import RolloutLayout, WeightLayout
    from mindspeed_rl.resharding.plan import make_plan, planned_dtypes

    cfg, _ = load_config(args.config_name, args.overrides, args.config_dir, files_exist=False)
    needs_rollout(cfg, "resharding")
    model, layout = resolve_model(cfg), derive_layout(cfg)
    training = WeightLayout.configured(cfg.actor, model, layout.dp * layout.cp)
    for rank in args.rank or ():
        if not 0 <= rank < layout.world:
            raise ConfigError([Violation("--rank", rank, "is no training rank", f"0 to {layout.world - 1}")])
    # what leaves for other devices is exported in full
    rollout = RolloutLayout.configured(cfg.generate_config) if layout.integrated else None
    bucket_bytes = int(cfg.generate_config.resharding_bucket_mb * 2**20)
    dtypes = planned_dtypes(cfg.actor, model)
    for rank in range(layout.world) if args.rank is None else args.rank:
        print(make_plan(model, dtypes, training, rank, bucket_bytes, rollout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
