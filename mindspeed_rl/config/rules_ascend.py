"""Rules on kernels, on features of MindSpeed, and on the environment of a run's processes."""

from __future__ import annotations

from itertools import chain

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.environment import (
    ALLOCATORS,
    DETERMINISTIC,
    EXPANDABLE,
    NPU_VARIABLES,
    TRAINERS,
)
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.kernels import KERNEL_KEYS
from mindspeed_rl.config.layout import pipeline_chunks
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import Found, rule
from mindspeed_rl.config.rules_devices import ring_attention_runs_on
from mindspeed_rl.config.schema import Config

_ENVIRONMENT = "runtime_env.env_vars"
_NPU_KEYS = {
    "npu_deterministic": "sets switches of NPU kernels and of HCCL",
    "recompute_activation_function": "is a feature of MindSpeed",
}

_ENGINE_KEYS = ("torchair_graph", "ascend_scheduler")

# Features of MindSpeed that other parts of this trainer would not go together with: why, and what to use instead
_REFUSED = {
    "reuse_fp32_param": (
        "would leave only halves of the optimizer's float32 weights, which offloading and checkpoints read whole",
        "set it to false; use_distributed_optimizer: true divides these weights over data-parallel ranks",
    ),
    "swap_optimizer": (
        "would leave the optimizer's state empty on the device between steps, where offloading and checkpoints read "
        "it, and starts from arguments of Megatron's own training loop, which does not run here",
        "set it to false; generate_config.offload_train_optimizer: true keeps the state on the host while generating",
    ),
    "swap_attention": (
        "would have no effect: MindSpeed installs it in Megatron's own training loop, which does not run here",
        "set it to false; recompute_granularity: full saves the same activations by computing them anew",
    ),
    "moe_tp_extend_ep": (
        "would give tensor-parallel ranks whole experts, while resharding and checkpoints read a slice of each",
        "set it to false, and a larger expert_model_parallel_size",
    ),
}


def unfit_for(cfg: Config, kind: str) -> Found:
    """What does not run on devices of this kind; asked for again when `device: auto` has been found to be `kind`."""
    yield from ring_attention_runs_on(cfg, kind)
    yield from _kernels_run_on(cfg, kind)
    yield from _npu_keys_run_on(cfg, kind)
    yield from _engine_keys_run_on(cfg, kind)
    yield from _variables_act_on(cfg, kind)


# ---------------------------------------------------------------- kernels and features


@rule("device", *(f"actor.{key}" for key in KERNEL_KEYS))
def kernels_are_there(cfg: Config) -> Found:
    if cfg.device != "auto":
        yield from _kernels_run_on(cfg, cfg.device)


def _kernels_run_on(cfg: Config, kind: str) -> Found:
    for key, possible in KERNEL_KEYS.items():
        value = getattr(cfg.actor, key)
        if value is not None and value not in possible[kind]:
            message = f"device = {kind!r} has {'no such kernel' if value else 'no other way to compute it'}"
            yield Violation(actor_path(cfg, key), value, message, "remove it, or set it to null")


@rule("device", *(f"actor.{key}" for key in _NPU_KEYS))
def npu_keys_are_for_npus(cfg: Config) -> Found:
    if cfg.device != "auto":
        yield from _npu_keys_run_on(cfg, cfg.device)


@rule("device", *(f"generate_config.{key}" for key in _ENGINE_KEYS))
def vllm_ascend_keys_are_for_npus(cfg: Config) -> Found:
    if cfg.device != "auto":
        yield from _engine_keys_run_on(cfg, cfg.device)


def _npu_keys_run_on(cfg: Config, kind: str) -> Found:
    for key, what in _NPU_KEYS.items():
        if kind != "npu" and getattr(cfg.actor, key):
            message = f"{what}, and has no effect with device = {kind!r}"
            yield Violation(actor_path(cfg, key), True, message, "set it to false")


def _engine_keys_run_on(cfg: Config, kind: str) -> Found:
    for key in _ENGINE_KEYS:
        if kind != "npu" and getattr(cfg.generate_config, key):
            message = f"is a feature of vLLM-Ascend, and has no effect with device = {kind!r}"
            yield Violation(f"generate_config.{key}", True, message, "set it to false")


@rule("generate_config.torchair_graph", "generate_config.enforce_eager")
def torchair_makes_graphs(cfg: Config) -> Found:
    if cfg.generate_config.torchair_graph and cfg.generate_config.enforce_eager:
        hint = "set enforce_eager: false, or torchair_graph: false"
        yield Violation("generate_config.torchair_graph", True, "makes graphs, and enforce_eager = True none", hint)


@rule("generate_config.torchair_graph", needs_model=True)
def torchair_knows_the_model(cfg: Config, model: ModelConfig) -> Found:
    if cfg.generate_config.torchair_graph and not model.has_latent_attention:
        message = f"is for DeepSeek models, not for {model.architecture}"
        hint = "set it to false; enforce_eager: false captures ACL graphs"
        yield Violation("generate_config.torchair_graph", True, message, hint)


@rule(*(f"actor.{key}" for key in _REFUSED))
def features_go_together(cfg: Config) -> Found:
    for key, (message, hint) in _REFUSED.items():
        if getattr(cfg.actor, key):
            yield Violation(actor_path(cfg, key), True, message, hint)


@rule(
    "actor.recompute_activation_function",
    "actor.recompute_granularity",
    "actor.recompute_method",
    "actor.recompute_num_layers",
    "actor.pipeline_model_parallel_size",
    "actor.num_layer_list",
    "actor.noop_layers",
    "actor.num_layers_per_virtual_pipeline_stage",
    needs_model=True,
)
def activations_are_not_recomputed_twice(cfg: Config, model: ModelConfig) -> Found:
    actor = cfg.actor
    if not actor.recompute_activation_function or actor.recompute_granularity != "full":
        return
    if model.num_layers + len(actor.noop_layers or ()) < actor.pipeline_model_parallel_size:
        return  # refused for that
    chunks = chain(*pipeline_chunks(model.num_layers, actor))
    largest = max(map(len, chunks), default=0)
    if not largest:
        return  # likewise
    if actor.recompute_method == "uniform" or (actor.recompute_num_layers or 0) >= largest:
        message = "has no effect: recompute_granularity = 'full' recomputes all layers, activations included"
        hint = "set it to false, or recompute_method: block with fewer recompute_num_layers"
        yield Violation(actor_path(cfg, "recompute_activation_function"), True, message, hint)


# ---------------------------------------------------------------- environment


@rule(_ENVIRONMENT)
def variables_have_values_that_mean_something(cfg: Config) -> Found:
    for name, value in cfg.runtime_env.env_vars.items():
        known = NPU_VARIABLES.get(name)
        if known is not None and not known.accepts(value):
            yield Violation(f"{_ENVIRONMENT}.{name}", value, f"must be {known.values}", f"it is for: {known.meaning}")


@rule(_ENVIRONMENT, "actor.npu_deterministic")
def variables_are_not_the_trainers(cfg: Config) -> Found:
    for name, value in cfg.runtime_env.env_vars.items():
        path = f"{_ENVIRONMENT}.{name}"
        if name in TRAINERS:
            yield Violation(path, value, f"the trainer sets it itself: {TRAINERS[name]}", "remove it")
        elif cfg.actor.npu_deterministic and name in DETERMINISTIC:
            message = f"npu_deterministic = True sets it to {DETERMINISTIC[name]!r}"
            yield Violation(path, value, message, "remove it, or set npu_deterministic: false")


@rule(_ENVIRONMENT, "device")
def variables_act_on_device(cfg: Config) -> Found:
    if cfg.device != "auto":
        yield from _variables_act_on(cfg, cfg.device)


def _variables_act_on(cfg: Config, kind: str) -> Found:
    for name, value in cfg.runtime_env.env_vars.items():
        path = f"{_ENVIRONMENT}.{name}"
        if kind != "npu" and name in NPU_VARIABLES:
            yield Violation(path, value, f"has no effect with device = {kind!r}: only NPUs read it", "remove it")
        elif kind != "cpu" and name in ALLOCATORS and EXPANDABLE.search(value):
            message = (
                "vLLM's memory pool, from which a sleeping engine gives memory back, refuses expandable segments"
            )
            yield Violation(path, value, message, "remove expandable_segments")
        elif kind == "cpu" and name == "VLLM_MLA_DISABLE":
            yield Violation(path, value, "the trainer sets it itself with device = 'cpu'", "remove it")
