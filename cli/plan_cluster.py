"""The fastest layouts on a cluster: `python cli/plan_cluster.py --config-name … --cluster h200 --devices 64`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed_rl.common.command_line import config_parser, run_command

SAMPLED = 512  # responses that stand for all


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = config_parser("plan_cluster", __doc__)
    parser.add_argument(
        "--cluster", required=True, help="a type of devices in configs/cluster, or a YAML file like those"
    )
    parser.add_argument("--devices", type=int, required=True, help="devices of the run, in full nodes if several")
    parser.add_argument("--prompt-tokens", type=float, help="mean length of prompts; default: half the longest")
    parser.add_argument("--response-tokens", type=float, help="mean length of responses; default: half the longest")
    parser.add_argument(
        "--response-spread",
        type=float,
        default=0.8,
        help="standard deviation of the logarithm of lengths; 0: all have the mean (default: %(default)s)",
    )
    parser.add_argument(
        "--reward-seconds", type=float, default=1e-3, help="a verifier's time for a response (default: %(default)s)"
    )
    parser.add_argument(
        "--staleness", type=int, help="give rollout devices of its own, and let it be so many iterations ahead"
    )
    parser.add_argument("--top", type=int, default=10, help="layouts to show (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all layouts here, with keys to set and to remove")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a wrong configuration, else that of the error."""
    args = build_parser().parse_intermixed_args(argv)
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from omegaconf import OmegaConf
    from rich.console import Console

    from mindspeed_rl.common.errors import ConfigError
    from mindspeed_rl.config.compose import compose_yaml, put
    from mindspeed_rl.planner.cluster import load_cluster
    from mindspeed_rl.planner.report import print_search, tokens_per_second
    from mindspeed_rl.planner.search import WITHOUT, search

    base: Any = OmegaConf.to_container(
        OmegaConf.create(compose_yaml(args.config_name, args.overrides, args.config_dir))
    )
    cluster = load_cluster(args.cluster)
    if violations := list(_unusable(args, cluster.devices_per_node)):
        raise ConfigError(violations)
    work = _work(args, base)
    found = search(base, cluster, args.devices, work, args.staleness)
    print_search(found, work, args.top, Console(width=None if sys.stdout.isatty() else 200))
    if args.json:
        plans = [
            {
                "seconds": {**asdict(plan.time), "total": plan.time.total},
                "tokens_per_second_per_device": tokens_per_second(plan, work),
                "configuration": put({}, plan.overrides),
                "without": WITHOUT,
            }
            for plan in found.plans
        ]
        Path(args.json).write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
    return 0


def _unusable(args: argparse.Namespace, node: int) -> Any:
    from mindspeed_rl.common.errors import Violation

    least = {"devices": 1, "top": 1, "response_spread": 0, "reward_seconds": 0}
    if args.staleness is not None:
        least |= {"devices": 2, "staleness": 1}
    for name, smallest in least.items():
        if getattr(args, name) < smallest:
            yield Violation(f"--{name.replace('_', '-')}", getattr(args, name), f"must be {smallest} or more")
    if args.devices > node and args.devices % node:
        below = args.devices // node * node
        hint = f"{below} or {below + node}"
        yield Violation("--devices", args.devices, f"is no multiple of the {node} devices of a node", hint)


def _work(args: argparse.Namespace, base: dict[str, Any]) -> Any:
    """Lengths, as far as they are not given half of what the configuration allows."""
    from mindspeed_rl.common.errors import ConfigError, Violation
    from mindspeed_rl.config.generate import SamplingConfig
    from mindspeed_rl.config.schema import RLConfig
    from mindspeed_rl.planner.lengths import lognormal_lengths
    from mindspeed_rl.planner.step import Work

    sampling = base.get("generate_config", {}).get("sampling_config", {})
    longest = {
        "prompt": base.get("rl_config", {}).get("max_prompt_length", RLConfig().max_prompt_length),
        "response": sampling.get("max_tokens", SamplingConfig().max_tokens),
    }
    given = {name: getattr(args, f"{name}_tokens") for name in longest}
    means = {name: longest[name] / 2 if mean is None else mean for name, mean in given.items()}
    wrong = [
        Violation(f"--{name}-tokens", mean, f"must be between 1 and the longest, {longest[name]}")
        for name, mean in means.items()
        if not 1 <= mean <= longest[name]
    ]
    if wrong:
        raise ConfigError(wrong)
    lengths = lognormal_lengths(means["response"], longest["response"], args.response_spread, SAMPLED)
    return Work(means["prompt"], lengths, args.reward_seconds)


if __name__ == "__main__":
    sys.exit(main())
