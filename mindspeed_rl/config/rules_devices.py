"""Rules on devices: how many there are, what they do, and how they divide the model."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import PP, TP, WORLD, Found, divides, model_parallel, near_multiples, rule
from mindspeed_rl.config.schema import Config

INTEGRATED, ROLLOUT_RESOURCE = "rl_config.use_integrated_worker", "rl_config.rollout_resource"
INFER_TP = "generate_config.infer_tensor_parallel_size"
OFFLOADS = ("offload_train_optimizer", "offload_train_grad", "offload_train_param", "offload_reference")


@rule(WORLD, TP, PP)
def world_holds_training_layout(cfg: Config) -> Found:
    world, tp, pp = cfg.rl_config.actor_resource.num_npus, *model_parallel(cfg)
    if world % (tp * pp):
        message = f"is not a multiple of TP x PP = {tp} x {pp} (tensor_ x pipeline_model_parallel_size)"
        yield Violation(WORLD, world, message, f"possible: {near_multiples(world, tp * pp)}")


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


@rule(INTEGRATED, *(f"generate_config.{key}" for key in OFFLOADS))
def offload_makes_room_for_rollout(cfg: Config) -> Found:
    for key in OFFLOADS:
        if getattr(cfg.generate_config, key) and not cfg.rl_config.use_integrated_worker:
            message = "makes room for rollout, which has devices of its own with use_integrated_worker = False"
            yield Violation(f"generate_config.{key}", True, message, "set it to false")


def mlp_widths(model: ModelConfig, experts: bool = True) -> list[str]:
    """The widths of MLPs that tensor parallelism divides; with or without those of experts."""
    dense = ["ffn_hidden_size"] if model.num_moe_layers < model.num_layers else []
    return [*dense, "moe_ffn_hidden_size"] if experts and model.num_moe_layers else dense


@rule(TP, needs_model=True)
def training_tp_divides_model(cfg: Config, model: ModelConfig) -> Found:
    path, tp = actor_path(cfg, "tensor_model_parallel_size"), cfg.actor.tensor_model_parallel_size
    for key in ("num_attention_heads", "num_query_groups", *mlp_widths(model)):
        yield from divides(f"the model's {key}", getattr(model, key), path, tp)


@rule(INFER_TP, "generate_config.enable_expert_parallel", needs_model=True)
def rollout_tp_divides_model(cfg: Config, model: ModelConfig) -> Found:
    infer_tp, groups = cfg.generate_config.infer_tensor_parallel_size, model.num_query_groups
    widths = mlp_widths(model, experts=not cfg.generate_config.enable_expert_parallel)
    for key in ("num_attention_heads", *widths):
        yield from divides(f"the model's {key}", getattr(model, key), INFER_TP, infer_tp)
    if groups % infer_tp and infer_tp % groups:  # vLLM replicates key/value heads only a whole number of times
        message = f"neither divides nor is a multiple of the model's num_query_groups = {groups}"
        yield Violation(INFER_TP, infer_tp, message, f"possible: {near_multiples(infer_tp, groups)}")


@rule(PP, needs_model=True)
def pp_divides_layers(cfg: Config, model: ModelConfig) -> Found:
    path = actor_path(cfg, "pipeline_model_parallel_size")
    yield from divides("the model's num_layers", model.num_layers, path, cfg.actor.pipeline_model_parallel_size)


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
