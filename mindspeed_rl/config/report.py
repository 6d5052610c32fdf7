"""What `--dry-run` prints: the layout, the batch arithmetic and the memory estimate of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.files import missing_files, resolve_model
from mindspeed_rl.config.layout import Chunks, Layout, derive_layout, pipeline_chunks
from mindspeed_rl.config.memory import GIB, estimate_memory
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config

_SHOWN_RANKS = 64


def print_report(cfg: Config, console: Console) -> None:
    """Print everything that follows from a valid configuration; paths missing on this machine are notes."""
    layout = derive_layout(cfg)
    console.print(_parallel_table(cfg, layout))
    places = {"TP": layout.tp_rank, "CP": layout.cp_rank, "DP": layout.dp_rank, "PP": layout.pp_rank}
    if layout.ep > 1:
        places["EP"] = layout.ep_rank
    engines = {"rollout engine": layout.rollout_replica, "rank in engine": layout.rollout_tp_rank}
    if cfg.is_supervised:
        console.print(_rank_table("Ranks", layout.world, places))
    elif layout.integrated:
        console.print(_rank_table("Ranks", layout.world, places | engines))
    else:
        console.print(_rank_table("Training ranks", layout.world, places))
        console.print(_rank_table("Rollout ranks", layout.rollout_world, engines))
    console.print(_batch_table(cfg, layout))
    try:
        model = resolve_model(cfg)
    except ConfigError as error:  # model: auto, and the checkpoint is elsewhere
        console.print(f"No memory estimate: {error.violations[0]}", markup=False)
    else:
        if layout.pp > 1:
            console.print(f"Layers of the pipeline stages: {_stages(pipeline_chunks(model.num_layers, cfg.actor))}\n")
        console.print(_memory_table(cfg, model, layout))
    _print_notes(console, missing_files(cfg))
    console.print("Configuration is valid.")


def _stages(stages: Chunks) -> str:
    """As `0-6, 14-20 | 7-13, 21-27`."""
    return " | ".join(", ".join(f"{layers[0]}-{layers[-1]}" for layers in chunks) for chunks in stages)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column == "from" else "right")
    return table


def _parallel_table(cfg: Config, layout: Layout) -> Table:
    table = _table("Layout", "what", "value", "from")
    rows: list[tuple[str, Any, str]] = [
        ("device", cfg.device, "device"),
        ("training ranks (devices)", layout.world, "rl_config.actor_resource.num_npus"),
        ("training tensor parallel (TP)", layout.tp, "tensor_model_parallel_size"),
        ("training context parallel (CP)", layout.cp, "context_parallel_size"),
        ("training pipeline parallel (PP)", layout.pp, "pipeline_model_parallel_size"),
        ("training data parallel (DP)", layout.dp, "ranks / (TP x CP x PP)"),
    ]
    if layout.ep > 1:
        rows.insert(5, ("training expert parallel (EP)", layout.ep, "expert_model_parallel_size, of DP x CP"))
    if not cfg.is_supervised:
        rows += _rollout_rows(cfg, layout)
    for what, value, source in rows:
        table.add_row(what, str(value), source)
    return table


def _rollout_rows(cfg: Config, layout: Layout) -> list[tuple[str, Any, str]]:
    rows: list[tuple[str, Any, str]] = [
        ("rollout tensor parallel", layout.infer_tp, "generate_config.infer_tensor_parallel_size"),
        ("rollout engines", layout.rollout_replicas, "rollout ranks / rollout tensor parallel"),
    ]
    if layout.integrated:
        cells = ("resharding cells", len(layout.cells()), "sets of ranks that exchange weights among themselves")
        return [*rows, cells]
    return [
        ("rollout ranks (devices)", layout.rollout_world, "rl_config.rollout_resource.num_npus"),
        *rows,
        ("iterations that rollout may be ahead", cfg.rl_config.staleness, "rl_config.staleness"),
    ]


def _rank_table(title: str, world: int, places: Mapping[str, Callable[[int], int]]) -> Table:
    table = _table(title, "rank", *places)
    for rank in range(min(world, _SHOWN_RANKS)):
        table.add_row(str(rank), *(str(place(rank)) for place in places.values()))
    if world > _SHOWN_RANKS:
        table.add_row(f"… {world - _SHOWN_RANKS} more", *[""] * len(places))
    return table


def _batch_table(cfg: Config, layout: Layout) -> Table:
    table = _table("One iteration, from prompts to micro-batches", "what", "value", "from")
    cap = cfg.rl_config.max_packing_token_size
    micro_batches = (
        ("tokens of a micro-batch at most", cap, "max_packing_token_size")
        if cap
        else ("micro-batches of a mini-batch per rank", layout.micro_batches, "those / micro_batch_size, rounded up")
    )
    if cfg.is_supervised:
        table.title = "One optimizer step"
        given = [
            ("rows", layout.prompts_per_iteration, "global_batch_size"),
            ("sequences per rank", layout.sequences_per_mini_batch_per_rank, "rows x responses of a row / DP"),
            micro_batches,
            ("optimizer steps of the run", layout.total_optimizer_steps, "train_iters"),
        ]
        for what, value, source in given:
            table.add_row(what, f"{value:,}", source)
        return table
    rows = [
        ("prompts", layout.prompts_per_iteration, "global_batch_size"),
        ("sequences", layout.sequences_per_iteration, "prompts x n_samples_per_prompt"),
        ("mini-batches", layout.mini_batches, "prompts / mini_batch_size"),
        ("optimizer steps", layout.optimizer_steps_per_iteration, "mini-batches x epochs"),
        (
            "sequences of a mini-batch per rank",
            layout.sequences_per_mini_batch_per_rank,
            "mini_batch_size x n_samples_per_prompt / DP",
        ),
        micro_batches,
        ("optimizer steps of the run", layout.total_optimizer_steps, "optimizer steps x train_iters"),
    ]
    if layout.prompts_in_generation > layout.prompts_per_iteration:
        rows.insert(2, ("prompts in generation", layout.prompts_in_generation, "prompts / partial_rollout_threshold"))
        rows.insert(3, ("sequences in generation", layout.rows_in_generation, "those x n_samples_per_prompt"))
    if cfg.rl_config.filter_groups_enable:
        most = layout.prompts_per_iteration * cfg.rl_config.filter_groups_max_batches
        rows.insert(2, ("prompts generated at most", most, "prompts x filter_groups_max_batches"))
    for what, value, source in rows:
        table.add_row(what, f"{value:,}", source)
    return table


def _memory_table(cfg: Config, model: ModelConfig, layout: Layout) -> Table:
    memory = estimate_memory(cfg, model, layout)
    parameters = f"{model.num_parameters / 1e6:,.1f} M parameters"
    if model.num_moe_experts is not None:
        parameters += f", of which a token uses {model.active_parameters / 1e6:,.1f} M"
    table = _table(f"Memory per device, estimated ({parameters})", "what", "GiB")
    rows = {
        "training weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "critic: weights, gradients, optimizer state": memory.critic,
        "activations of a micro-batch": memory.activations,
        "logits of some tokens, their weights' gradient": memory.logits,
        "[bold]update, all together": memory.training,
        "reference weights, in their stage": memory.reference,
        "reward model's weights, in their stage": memory.reward_model,
        "largest scoring pass, with weights that come for it": memory.scoring,
        "rollout weights": memory.rollout_weights,
        "buckets and largest tensor of resharding": memory.buckets,
        "KV cache, all running sequences at full length": memory.kv_full,
        "training state kept while generating": memory.training_kept,
        "scoring between steps of rollout": memory.beside_rollout,
        "[bold]generating, all together": memory.generating,
    }
    if not layout.integrated:
        del rows["training state kept while generating"], rows["scoring between steps of rollout"]
    if cfg.is_supervised:
        of_rollout = ("rollout", "buckets", "KV", "training state", "scoring between", "[bold]generating", "critic")
        rows = {what: size for what, size in rows.items() if not what.startswith(of_rollout)}
    for what, size in rows.items():
        table.add_row(what, f"{size / GIB:,.3f}")
    return table


def _print_notes(console: Console, missing: Sequence[Violation]) -> None:
    for violation in missing:
        console.print(f"note: missing on this machine: {violation}", markup=False)
