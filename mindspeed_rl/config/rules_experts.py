"""Rules on mixtures of experts: how experts are divided in training and in rollout."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.layout import model_parallel
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import CP, EP, INFER_TP, PP, TP, WORLD, Found, divides, rule
from mindspeed_rl.config.schema import Config

INFER_EP, ENABLE = "generate_config.infer_expert_parallel_size", "generate_config.enable_expert_parallel"


# ---------------------------------------------------------------- training


@rule(EP, needs_model=True)
def expert_parallel_divides_experts(cfg: Config, model: ModelConfig) -> Found:
    path, ep = actor_path(cfg, "expert_model_parallel_size"), cfg.actor.expert_model_parallel_size
    if model.num_moe_experts is not None:
        yield from divides("the model's num_moe_experts", model.num_moe_experts, path, ep)
    elif ep > 1:
        yield Violation(path, ep, f"a {model.architecture} has no experts to share", "set it to 1")


@rule(EP, WORLD, TP, CP, PP)
def expert_parallel_divides_data_and_context_parallel(cfg: Config) -> Found:
    """Ranks share experts that have tokens of their own, of other sequences or of the same, to send to them."""
    path, ep = actor_path(cfg, "expert_model_parallel_size"), cfg.actor.expert_model_parallel_size
    tp, cp, pp = model_parallel(cfg)
    replicas = cp * (cfg.rl_config.actor_resource.num_npus // (tp * cp * pp))
    if replicas:
        yield from divides("the data- times context-parallel size, devices / (TP x PP)", replicas, path, ep)


@rule(TP, "actor.sequence_parallel", needs_model=True)
def experts_need_sequence_parallel(cfg: Config, model: ModelConfig) -> Found:
    """Megatron's own condition: otherwise every tensor-parallel rank would send the same tokens to the experts."""
    tp = cfg.actor.tensor_model_parallel_size
    if model.num_moe_experts is not None and tp > 1 and not cfg.actor.sequence_parallel:
        message = f"a model with experts and tensor_model_parallel_size = {tp} needs it"
        yield Violation(actor_path(cfg, "sequence_parallel"), False, message, "set it to true")


# ---------------------------------------------------------------- rollout


@rule(ENABLE, INFER_EP, INFER_TP)
def rollout_expert_parallel_size_is_that_of_the_engine(cfg: Config) -> Found:
    """vLLM divides experts over all devices of an engine, or not at all."""
    generate = cfg.generate_config
    size, tp = generate.infer_expert_parallel_size, generate.infer_tensor_parallel_size
    if not generate.enable_expert_parallel:
        if size > 1:
            yield Violation(INFER_EP, size, "needs enable_expert_parallel = True", "set that to true, or this to 1")
    elif tp == 1:
        message = "has no effect on engines of one device, infer_tensor_parallel_size = 1"
        yield Violation(ENABLE, True, message, "set it to false, or a larger infer_tensor_parallel_size")
    elif size != tp and "infer_expert_parallel_size" in generate.model_fields_set:
        message = f"enable_expert_parallel = True divides experts over all {INFER_TP} = {tp} devices of an engine"
        yield Violation(INFER_EP, size, message, f"set it to {tp}, or remove it")


@rule(ENABLE, needs_model=True)
def rollout_expert_parallel_needs_experts(cfg: Config, model: ModelConfig) -> Found:
    if cfg.generate_config.enable_expert_parallel and model.num_moe_experts is None:
        message = f"a {model.architecture} has no experts to divide"
        yield Violation(ENABLE, True, message, "set it to false")


@rule(ENABLE, "device")
def rollout_expert_parallel_runs_on_device(cfg: Config) -> Found:
    if cfg.generate_config.enable_expert_parallel and cfg.device == "cpu":
        message = "device = 'cpu': vLLM's CPU kernels take no map of a rank's experts"
        yield Violation(ENABLE, True, message, "set it to false: every expert is then cut by tensor parallelism")
