"""What `cli/plan_cluster.py` says."""

from __future__ import annotations

from dataclasses import fields

import yaml
from rich.console import Console
from rich.table import Table

from mindspeed_rl.config.compose import put
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.metrics.throughput import tokens_per_second_per_device
from mindspeed_rl.planner.search import WITHOUT, Plan, Search
from mindspeed_rl.planner.step import StepTime, Work

STAGES = tuple(field.name for field in fields(StepTime))


def print_search(found: Search, work: Work, shown: int, console: Console) -> None:
    """The fastest layouts, and how to set the best of them."""
    table = Table(title="Seconds of an iteration, estimated", title_justify="left")
    for column in ("layout", "memory is saved by", "total", "tokens/s/device", *STAGES):
        table.add_column(column, justify="left" if column in ("layout", "memory is saved by") else "right")
    for plan in found.plans[:shown]:
        seconds = [f"{getattr(plan.time, stage):,.1f}" for stage in STAGES]
        rate = f"{tokens_per_second(plan, work):,.0f}"
        table.add_row(layout_text(plan.layout), _savings(plan), f"{plan.time.total:,.1f}", rate, *seconds)
    console.print(table)
    console.print(f"{found.tried} combinations tried, {len(found.plans)} fit. What others broke, and how many:")
    for path, count in found.refused.most_common(5):
        console.print(f"  {path}: {count}", markup=False, highlight=False)
    without = ", ".join(WITHOUT)
    console.print(f"\nThe first one, to be merged into the run's configuration, without {without}:\n", markup=False)
    console.print(yaml.safe_dump(put({}, found.plans[0].overrides), sort_keys=False), markup=False, highlight=False)


def tokens_per_second(plan: Plan, work: Work) -> float:
    """Prompts and responses of an iteration, of each device of the run."""
    tokens = plan.layout.sequences_per_iteration * (work.prompt + work.response)
    return tokens_per_second_per_device(tokens, plan.time.total, plan.layout.devices)


def layout_text(layout: Layout) -> str:
    """As `TP 4 x DP 2, rollout TP 2 x 4`; sizes of 1 are left out, but for data parallelism."""
    sizes = {"TP": layout.tp, "CP": layout.cp, "PP": layout.pp}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] + [f"DP {layout.dp}"]
    experts = f" (EP {layout.ep})" if layout.ep > 1 else ""
    return f"{' x '.join(parts)}{experts}, rollout TP {layout.infer_tp} x {layout.rollout_replicas}"


def _savings(plan: Plan) -> str:
    offloaded = [key.rpartition("offload_")[2] for key, on in plan.overrides.items() if "offload_" in key and on]
    layers = plan.overrides.get("actor_config.recompute_num_layers")
    method = plan.overrides.get("actor_config.recompute_method")
    recomputed = {None: "", "block": f"{layers} layers recomputed", "uniform": "all layers recomputed"}[method]
    cap = f"{plan.overrides['rl_config.max_packing_token_size']:,} tokens a pass"
    moved = f"offload: {', '.join(offloaded)}" if offloaded else ""
    return "; ".join(filter(None, [cap, recomputed, moved]))
