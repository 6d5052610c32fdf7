"""Whether a plan can fit into the memory of its devices, as far as shapes tell; looked at when all else is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.layout import derive_layout, uses_full_kl, uses_reward_model
from mindspeed_rl.config.memory import GIB, MemoryEstimate, estimate_memory
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import FORWARD_SIZES, INFER_TP, OF_REWARD_MODEL, OFFLOADS, Found
from mindspeed_rl.config.schema import Config

LIMIT = "device_memory_gib"
Parts = dict[str, float]  # bytes, by what takes them
Need = Callable[[Config, MemoryEstimate], tuple[Parts, float]]  # and how many there are for them
LEAST_BUCKET_MB = 16.0
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


def plan_fits_device(cfg: Config, model: ModelConfig) -> Found:
    """Violations of `device_memory_gib`, each with the changes that would do."""
    if cfg.device_memory_gib is None:
        return
    for what, parts, limit in shortages(cfg, estimate(cfg, model)):
        found = ", ".join(f"{part} {size / GIB:,.1f}" for part, size in parts.items() if size)
        message = f"{what} takes {sum(parts.values()) / GIB:,.1f} GiB ({found}), and there are {limit / GIB:,.1f}"
        yield Violation(LIMIT, cfg.device_memory_gib, message, _remedies(cfg, model, NEEDS[what]))


def shortages(cfg: Config, memory: MemoryEstimate) -> Iterator[tuple[str, Parts, float]]:
    """What does not fit into `device_memory_gib`: its parts, and how many bytes there are for them."""
    for what, need in NEEDS.items():
        if cfg.is_supervised and what not in ("an update", "scoring"):
            continue
        parts, limit = need(cfg, memory)
        if sum(parts.values()) > limit:
            yield what, parts, limit


def _remedies(cfg: Config, model: ModelConfig, need: Need) -> str:
    """Each key that would do alone, with the first such value; else all offloading; else more devices."""

    def fits(changed: Config) -> bool:
        parts, limit = need(changed, estimate(changed, model))
        return sum(parts.values()) <= limit

    fitting: dict[str, Any] = {}
    for key, value, changed in _changes(cfg):
        is_read = not cfg.is_supervised or not key.startswith(("generate_config", "rl_config", "reward_config"))
        if key not in fitting and is_read and fits(changed):
            fitting[key] = value
    if fitting:
        return "; or ".join(f"{key}: {value}" for key, value in fitting.items())
    offloads = _offloads(cfg)
    if not cfg.is_supervised and fits(with_generation(cfg, **dict.fromkeys(offloads, True))):
        return f"all of {', '.join(offloads)}: true"
    return f"a larger {INFER_TP}" if need is _engine else "more devices, as with a larger tensor_model_parallel_size"


def estimate(cfg: Config, model: ModelConfig) -> MemoryEstimate:
    """Of a configuration whose divisions come out even."""
    return estimate_memory(cfg, model, derive_layout(cfg))


def _shares_devices(cfg: Config) -> bool:
    """Training and rollout take turns on them."""
    return cfg.rl_config.use_integrated_worker and not cfg.is_supervised


def _limit(cfg: Config) -> float:
    assert cfg.device_memory_gib is not None
    return cfg.device_memory_gib * GIB


def _for_rollout(cfg: Config, memory: MemoryEstimate) -> float:
    """What the engine takes, whatever it needs."""
    if cfg.device == "cpu":
        return memory.rollout_weights + cfg.generate_config.cpu_kv_cache_gib * GIB
    return cfg.generate_config.gpu_memory_utilization * _limit(cfg)


def _update(cfg: Config, memory: MemoryEstimate) -> tuple[Parts, float]:
    generate, integrated = cfg.generate_config, _shares_devices(cfg)
    asleep = _for_rollout(cfg, memory) if cfg.device == "cpu" and integrated else 0
    reference_stays = uses_full_kl(cfg) or not (generate.offload_reference and integrated)
    reward_model_stays = not (generate.offload_reward_model and integrated)
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "critic": memory.critic,
        "activations": memory.activations,
        "logits": memory.logits,
        "reference": memory.reference if reference_stays else 0,
        "reward model": memory.reward_model if reward_model_stays else 0,
        "rollout, which cannot sleep": asleep,
    }
    return parts, _limit(cfg)


def _generation(cfg: Config, memory: MemoryEstimate) -> tuple[Parts, float]:
    parts = {
        "the rollout engine": _for_rollout(cfg, memory),
        "training state that stays": memory.training_kept,
        "scoring in between": memory.beside_rollout,
    }
    return parts, _limit(cfg)


def _scoring(cfg: Config, memory: MemoryEstimate) -> tuple[Parts, float]:
    """The largest pass without gradients, when the rollout engine sleeps."""
    integrated = _shares_devices(cfg)
    stays = memory.training_kept
    if not integrated:
        stays = memory.weights + memory.gradients + memory.optimizer + memory.critic + memory.frozen
    parts = {
        "training state that stays": stays,
        "a pass, and weights that come for it": memory.scoring,
        "rollout, which cannot sleep": _for_rollout(cfg, memory) if cfg.device == "cpu" and integrated else 0,
    }
    return parts, _limit(cfg)


def _engine(cfg: Config, memory: MemoryEstimate) -> tuple[Parts, float]:
    sequence = memory.kv_per_token * cfg.generate_config.max_model_len
    return {"weights": memory.rollout_weights, "cache of one sequence": sequence}, _for_rollout(cfg, memory)


def _resharding(cfg: Config, memory: MemoryEstimate) -> tuple[Parts, float]:
    """Both engines' weights at once, before those of training may leave; the cache comes later where it can."""
    generate, integrated = cfg.generate_config, _shares_devices(cfg)
    stays = memory.training_kept - (0 if generate.offload_train_param else memory.weights)
    if not integrated:
        stays = memory.gradients + memory.optimizer + memory.critic + memory.frozen
    rollout = _for_rollout(cfg, memory) if cfg.device == "cpu" else memory.rollout_weights
    parts = {
        "training weights": memory.weights,
        "rollout": rollout if integrated else 0,
        "training state that stays": stays,
        "buckets and the largest tensor": memory.buckets,
    }
    return parts, _limit(cfg)


NEEDS: dict[str, Need] = {
    "an update": _update,
    "scoring": _scoring,
    "generation": _generation,
    "the rollout engine": _engine,
    "resharding": _resharding,
}


def _offloads(cfg: Config) -> tuple[str, ...]:
    """Those of what the run has."""
    return (*OFFLOADS, OF_REWARD_MODEL) if uses_reward_model(cfg) else OFFLOADS


def _changes(cfg: Config) -> Iterator[tuple[str, Any, Config]]:
    """Key, value and outcome of single changes that save memory, those first that cost little."""
    generate, actor = cfg.generate_config, cfg.actor
    for key in _offloads(cfg):
        if not getattr(generate, key):
            yield f"generate_config.{key}", "true", with_generation(cfg, **{key: True})
    if not actor.use_distributed_optimizer:
        changed = with_training(cfg, use_distributed_optimizer=True)
        yield actor_path(cfg, "use_distributed_optimizer"), "true", changed
    smaller = actor.micro_batch_size // 2
    while smaller and cfg.rl_config.max_packing_token_size is None:
        yield actor_path(cfg, "micro_batch_size"), smaller, with_training(cfg, micro_batch_size=smaller)
        smaller //= 2
    sizes = {key: getattr(cfg.rl_config, key) for key in FORWARD_SIZES}
    smaller = max(sizes.values()) // 2
    while smaller and cfg.rl_config.max_packing_token_size is None:
        changed = with_rl(cfg, **{key: min(size, smaller) for key, size in sizes.items()})
        yield "rl_config.*_forward_micro_batch_size", f"{smaller} at most", changed
        smaller //= 2
    if not cfg.rl_config.blocking:
        yield "rl_config.blocking", "true", with_rl(cfg, blocking=True)
    every_layer: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    if any(getattr(actor, key) != value for key, value in every_layer.items()):
        value = "full, recompute_method: uniform, recompute_num_layers: 1"
        yield actor_path(cfg, "recompute_granularity"), value, with_training(cfg, **every_layer)
    cap = (cfg.rl_config.max_packing_token_size or 0) // 2
    while cap >= cfg.longest_sequence:
        yield "rl_config.max_packing_token_size", cap, with_rl(cfg, max_packing_token_size=cap)
        cap //= 2
    bucket = generate.resharding_bucket_mb
    while bucket > LEAST_BUCKET_MB:
        bucket = max(bucket / 2, LEAST_BUCKET_MB)
        yield "generate_config.resharding_bucket_mb", bucket, with_generation(cfg, resharding_bucket_mb=bucket)
    for share in SHARES if cfg.device != "cpu" else ():
        yield "generate_config.gpu_memory_utilization", share, with_generation(cfg, gpu_memory_utilization=share)


def with_generation(cfg: Config, **values: Any) -> Config:
    """With other values in `generate_config`; like the next two, it checks nothing."""
    return cfg.model_copy(update={"generate_config": cfg.generate_config.model_copy(update=values)})


def with_rl(cfg: Config, **values: Any) -> Config:
    """With other values in `rl_config`."""
    return cfg.model_copy(update={"rl_config": cfg.rl_config.model_copy(update=values)})


def with_training(cfg: Config, **values: Any) -> Config:
    """With other values for the actor."""
    changed = cfg.model_copy()
    changed.__dict__["actor"] = cfg.actor.model_copy(update=values)  # what is derived from two sections, and cached
    for derived in ("critic", "reward_model"):
        changed.__dict__.pop(derived, None)
    return changed
