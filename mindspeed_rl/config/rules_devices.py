"""Rules on devices: how many there are, what they do, and how they divide the model."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.layout import model_parallel, pipeline_chunks
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import (
    CP,
    INFER_TP,
    OF_REWARD_MODEL,
    OFFLOADS,
    PP,
    TP,
    WORLD,
    Found,
    divides,
    near_multiples,
    rule,
)
from mindspeed_rl.config.schema import Config

LAYER_LIST, NOOP = "actor.num_layer_list", "actor.noop_layers"
CP_ALGO = "actor.context_parallel_algo"
VPP = "actor.num_layers_per_virtual_pipeline_stage"
INTEGRATED, ROLLOUT_RESOURCE = "rl_config.use_integrated_worker", "rl_config.rollout_resource"


@rule(WORLD, TP, CP, PP)
def world_holds_training_layout(cfg: Config) -> Found:
    world, (tp, cp, pp) = cfg.rl_config.actor_resource.num_npus, model_parallel(cfg)
    if world % (tp * cp * pp):
        names = "tensor_model_ x context_ x pipeline_model_parallel_size"
        message = f"is not a multiple of TP x CP x PP = {tp} x {cp} x {pp} ({names})"
        yield Violation(WORLD, world, message, f"possible: {near_multiples(world, tp * cp * pp)}")


@rule(WORLD, ROLLOUT_RESOURCE, INFER_TP)
def world_holds_rollout_layout(cfg: Config) -> Found:
    own, infer_tp = cfg.rl_config.rollout_resource, cfg.generate_config.infer_tensor_parallel_size
    path, resource = (WORLD, cfg.rl_config.actor_resource) if own is None else (f"{ROLLOUT_RESOURCE}.num_npus", own)
    yield from divides(path, resource.num_npus, INFER_TP, infer_tp)


@rule(INTEGRATED, ROLLOUT_RESOURCE)
def rollout_has_devices(cfg: Config) -> Found:
    integrated, resource = cfg.rl_config.use_integrated_worker, cfg.rl_config.rollout_resource
    if not integrated and resource is None:
        hint = "set rollout_resource: {num_npus: …}, or use_integrated_worker: true"
        yield Violation(ROLLOUT_RESOURCE, None, "use_integrated_worker = False generates on devices of its own", hint)
    if integrated and resource is not None:
        message = "use_integrated_worker = True generates on the devices of actor_resource"
        hint = "remove it, or set use_integrated_worker: false"
        yield Violation(f"{ROLLOUT_RESOURCE}.num_npus", resource.num_npus, message, hint)


@rule(INTEGRATED, *(f"generate_config.{key}" for key in (*OFFLOADS, OF_REWARD_MODEL)))
def offload_makes_room_for_rollout(cfg: Config) -> Found:
    for key in (*OFFLOADS, OF_REWARD_MODEL):
        if getattr(cfg.generate_config, key) and not cfg.rl_config.use_integrated_worker:
            message = "makes room for rollout, which has devices of its own with use_integrated_worker = False"
            yield Violation(f"generate_config.{key}", True, message, "set it to false")


def mlp_widths(model: ModelConfig, experts: bool = True) -> list[str]:
    """The widths of MLPs that tensor parallelism divides; with or without those of experts that tokens choose."""
    widths = ["ffn_hidden_size"] if model.num_moe_layers < model.num_layers else []
    if model.moe_shared_expert_intermediate_size:
        widths.append("moe_shared_expert_intermediate_size")
    return [*widths, "moe_ffn_hidden_size"] if experts and model.num_moe_layers else widths


@rule(TP, needs_model=True)
def training_tp_divides_model(cfg: Config, model: ModelConfig) -> Found:
    path, tp = actor_path(cfg, "tensor_model_parallel_size"), cfg.actor.tensor_model_parallel_size
    for key in ("num_attention_heads", "num_query_groups", *mlp_widths(model)):
        yield from divides(f"the model's {key}", getattr(model, key), path, tp)


@rule(TP, CP, CP_ALGO, needs_model=True)
def context_parallel_divides_heads(cfg: Config, model: ModelConfig) -> Found:
    """With Ulysses each rank attends with some of the heads that its tensor-parallel rank has."""
    if cfg.actor.uses_ring_attention:
        return
    path, (tp, cp, _) = actor_path(cfg, "context_parallel_size"), model_parallel(cfg)
    heads, groups = model.num_attention_heads // tp, model.num_query_groups // tp
    yield from divides("the attention heads of a tensor-parallel rank", heads, path, cp)
    if groups and groups % cp and cp % groups:  # key/value heads are repeated a whole number of times
        message = f"neither divides nor is a multiple of the {groups} key/value heads of a tensor-parallel rank"
        yield Violation(path, cp, message, f"possible: {near_multiples(cp, groups)}")


@rule(CP, CP_ALGO, "device")
def ring_attention_has_kernels(cfg: Config) -> Found:
    yield from ring_attention_runs_on(cfg, cfg.device)


def ring_attention_runs_on(cfg: Config, kind: str) -> Found:
    """Asked for again when `device: auto` has been found to be `kind`."""
    if kind == "npu" and cfg.actor.uses_ring_attention:
        algorithm, message = cfg.actor.context_parallel_algo, f"ring attention is not built for device = {kind!r}"
        yield Violation(actor_path(cfg, "context_parallel_algo"), algorithm, message, "set it to ulysses_cp_algo")


@rule(INFER_TP, "generate_config.enable_expert_parallel", needs_model=True)
def rollout_tp_divides_model(cfg: Config, model: ModelConfig) -> Found:
    infer_tp, groups = cfg.generate_config.infer_tensor_parallel_size, model.num_query_groups
    widths = mlp_widths(model, experts=not cfg.generate_config.enable_expert_parallel)
    for key in ("num_attention_heads", *widths):
        yield from divides(f"the model's {key}", getattr(model, key), INFER_TP, infer_tp)
    if groups % infer_tp and infer_tp % groups:  # vLLM replicates key/value heads only a whole number of times
        message = f"neither divides nor is a multiple of the model's num_query_groups = {groups}"
        yield Violation(INFER_TP, infer_tp, message, f"possible: {near_multiples(infer_tp, groups)}")


@rule(PP, LAYER_LIST, NOOP, VPP, needs_model=True)
def pipeline_divides_layers(cfg: Config, model: ModelConfig) -> Found:
    actor, path = cfg.actor, actor_path(cfg, "pipeline_model_parallel_size")
    if actor.num_layer_list is not None:
        yield from _list_fits(cfg, actor.num_layer_list, model)
        return
    empty = actor.noop_layers or ()
    positions = model.num_layers + len(empty)
    wrong = [noop for noop in empty if noop >= positions]
    if wrong or len(set(empty)) < len(empty):
        message = f"must be different positions below {positions}, the model's num_layers and the empty ones"
        yield Violation(actor_path(cfg, "noop_layers"), list(empty), message)
        return
    what = "the model's num_layers" if not empty else "the model's num_layers and noop_layers together"
    uneven = list(divides(what, positions, path, actor.pipeline_model_parallel_size))
    yield from uneven or _chunks_fit(cfg, model)


def _list_fits(cfg: Config, layers: tuple[int, ...], model: ModelConfig) -> Found:
    path, pp = actor_path(cfg, "num_layer_list"), cfg.actor.pipeline_model_parallel_size
    if len(layers) != pp or min(layers) < 1 or sum(layers) != model.num_layers:
        total = f"the model's {model.num_layers} layers"
        message = f"must be {pp} numbers above 0 (one a pipeline stage) that add up to {total}"
        yield Violation(path, list(layers), message)
    for key in ("noop_layers", "num_layers_per_virtual_pipeline_stage"):
        if (value := getattr(cfg.actor, key)) is not None:
            message = "divides the layers evenly, num_layer_list as it says: only one of them can be set"
            yield Violation(actor_path(cfg, key), list(value) if isinstance(value, tuple) else value, message)


def _chunks_fit(cfg: Config, model: ModelConfig) -> Found:
    actor, path = cfg.actor, actor_path(cfg, "num_layers_per_virtual_pipeline_stage")
    stage = (model.num_layers + len(actor.noop_layers or ())) // actor.pipeline_model_parallel_size
    per_chunk = actor.num_layers_per_virtual_pipeline_stage
    if per_chunk is not None:
        if actor.pipeline_model_parallel_size == 1:
            yield Violation(path, per_chunk, "needs pipeline_model_parallel_size > 1", "remove it")
            return
        if stage % per_chunk or stage == per_chunk:
            possible = [size for size in range(1, stage) if stage % size == 0]
            message = f"must divide the {stage} layers of a pipeline stage in two parts or more"
            yield Violation(path, per_chunk, message, f"possible: {possible}" if possible else "remove it")
            return
    if any(not len(chunk) for chunks in pipeline_chunks(model.num_layers, actor) for chunk in chunks):
        message = "leaves a pipeline stage, or a chunk of one, without any layer"
        yield Violation(actor_path(cfg, "noop_layers"), list(actor.noop_layers or ()), message)


@rule("actor.overlap_grad_reduce", "actor.overlap_param_gather", "actor.use_distributed_optimizer")
def overlaps_have_what_they_need(cfg: Config) -> Found:
    actor, path = cfg.actor, actor_path(cfg, "overlap_param_gather")
    for key in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if actor.overlap_param_gather and not getattr(actor, key):
            yield Violation(path, True, f"needs {key}: true", f"set {key}: true, or overlap_param_gather: false")


@rule("actor.sequence_parallel", TP)
def sequence_parallel_needs_tp(cfg: Config) -> Found:
    if cfg.actor.sequence_parallel and cfg.actor.tensor_model_parallel_size == 1:
        hint = "set sequence_parallel: false, or a larger tensor_model_parallel_size"
        yield Violation(actor_path(cfg, "sequence_parallel"), True, "needs tensor_model_parallel_size > 1", hint)


@rule("device", "generate_config.gpu_memory_utilization", "generate_config.cpu_kv_cache_gib")
def rollout_memory_key_fits_device(cfg: Config) -> Found:
    """A CPU's cache has a size, an accelerator's is a share of its memory."""
    acts = {"gpu_memory_utilization": cfg.device != "cpu", "cpu_kv_cache_gib": cfg.device in ("cpu", "auto")}
    for key, has_effect in acts.items():
        if key in cfg.generate_config.model_fields_set and not has_effect:
            value, message = getattr(cfg.generate_config, key), f"has no effect with device = {cfg.device!r}"
            other = next(name for name in acts if name != key)
            yield Violation(
                f"generate_config.{key}", value, message, f"remove it; {other} is the key for this device"
            )
