"""Rules on low-rank adapters (LoRA)."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.lora import FUSED_MODULES, FUSED_OF, LoraConfig
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import Found, nearest, rule
from mindspeed_rl.config.schema import Config

RANK, MODULES = "actor.lora_r", "actor.lora_target_modules"


@rule(RANK, "actor.lora_alpha", MODULES)
def lora_keys_are_used(cfg: Config) -> Found:
    for key in ("lora_alpha", "lora_target_modules"):
        value, default = getattr(cfg.actor, key), LoraConfig.model_fields[key].default
        if not cfg.actor.lora_r and value != default:
            message = "has no effect with lora_r = 0: all weights train"
            yield Violation(actor_path(cfg, key), value, message, "set actor_config.lora_r, or remove it")


@rule(MODULES)
def lora_modules_are_known(cfg: Config) -> Found:
    path, modules = actor_path(cfg, "lora_target_modules"), cfg.actor.lora_target_modules
    if not modules:
        yield Violation(path, modules, "names no layer to train", f"possible: {', '.join(FUSED_MODULES)}")
    for module in dict.fromkeys(modules):
        if modules.count(module) > 1:
            yield Violation(path, modules, f"names {module} more than once", "name it once")
        if module in FUSED_OF:
            fused = FUSED_OF[module]
            others = ", ".join(FUSED_MODULES[fused])
            message = f"{module} is a name of Hugging Face's; in Megatron {others} are {fused}, with one adapter"
            yield Violation(path, modules, message, f"name {fused}")
        elif module not in FUSED_MODULES:
            message = f"{module} is not a layer that can have an adapter"
            yield Violation(path, modules, message, nearest(module, list(FUSED_MODULES)))


@rule(RANK, MODULES, needs_model=True)
def lora_modules_are_in_the_model(cfg: Config, model: ModelConfig) -> Found:
    if not cfg.actor.lora_r:
        return
    if model.has_latent_attention:
        message = f"the latent attention of a {model.architecture} has no adapters"
        yield Violation(actor_path(cfg, "lora_r"), cfg.actor.lora_r, message, "set it to 0: all weights train")
    elif model.num_moe_experts is not None:
        path, modules = actor_path(cfg, "lora_target_modules"), cfg.actor.lora_target_modules
        of_mlp = [module for module in modules if module in ("linear_fc1", "linear_fc2")]
        if of_mlp:
            message = f"{', '.join(of_mlp)}: the experts of a {model.architecture} have no adapters"
            yield Violation(path, modules, message, "name [linear_qkv, linear_proj], or one of them")
