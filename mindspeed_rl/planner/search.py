"""Layouts that a configuration could have on a cluster, the fastest first."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.compose import validate
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import Layout, derive_layout
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rules_memory import OFFLOADS
from mindspeed_rl.config.schema import Config
from mindspeed_rl.planner.cluster import Cluster
from mindspeed_rl.planner.step import StepTime, Work, step_time

Overrides = dict[str, Any]  # key path -> value
LEAST_TOKENS = 16384  # of a micro-batch, if memory allows: below that, products lose speed
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@dataclass(frozen=True)
class Plan:
    """A configuration that passes all rules, memory included, and how long its iterations take."""

    overrides: Overrides  # what makes it of the configuration that was asked about
    layout: Layout
    time: StepTime


@dataclass(frozen=True)
class Search:
    """What was found."""

    plans: list[Plan]  # the fastest first
    tried: int
    refused: Counter[str]  # by key path: how many combinations broke a rule there


def search(base: Mapping[str, Any], cluster: Cluster, devices: int, work: Work) -> Search:
    """Try the layouts that `devices` allow.

    Args:
        base: a composed configuration, valid or not: what the search sets may be what is wrong with it.
        cluster: the type of its devices.
        devices: how many.
        work: lengths and rewards.

    Raises:
        ConfigError: no layout fits; the violations are those of the combination that came nearest.
    """
    plans, refused, tried, nearest = list[Plan](), Counter[str](), 0, None
    model = _model(base, cluster, devices)
    for layout in _layouts(model, cluster, devices):
        for room in _rooms(base, model):  # the fastest first: what needs less memory is slower
            overrides = {**_machine(base, cluster, devices), **layout, **room}
            tried += 1
            try:
                cfg = validate(_changed(base, overrides))
            except ConfigError as error:
                refused.update({violation.path for violation in error.violations})
                if nearest is None or len(error.violations) < len(nearest.violations):
                    nearest = error
                if any(violation.path != "device_memory_gib" for violation in error.violations):
                    break  # less memory would not help
                continue
            found = derive_layout(cfg)
            plans.append(Plan(overrides, found, step_time(cfg, model, found, cluster, work)))
            break
    if not plans:
        assert nearest is not None, "there is at least one combination"
        raise nearest
    return Search(sorted(plans, key=lambda plan: plan.time.total), tried, refused)


def _machine(base: Mapping[str, Any], cluster: Cluster, devices: int) -> Overrides:
    return {
        "device": cluster.device,
        "device_memory_gib": cluster.memory_gib,
        "rl_config.use_integrated_worker": True,
        "rl_config.actor_resource": {"num_npus": devices},
        "rl_config.rollout_resource": None,
        "rl_config.staleness": 0,
        # tokens of a micro-batch, not sequences, decide about speed and memory
        "rl_config.use_dynamic_bsz": True,
        **dict.fromkeys(_SEQUENCES),
    }


# sizes in sequences, which are not set beside a cap of tokens
_SEQUENCES = (
    "megatron_training.micro_batch_size",
    "actor_config.micro_batch_size",
    *(f"rl_config.{model}_forward_micro_batch_size" for model in ("actor", "ref", "critic")),
)


def _model(base: Mapping[str, Any], cluster: Cluster, devices: int) -> ModelConfig:
    """Of the configuration, whatever else is wrong with it."""
    sections = {key: base[key] for key in ("model",) if key in base}
    named = {**base.get("megatron_training", {}), **base.get("actor_config", {})}
    kept = {key: named[key] for key in ("model", "load") if key in named}
    return resolve_model(Config.model_validate({"megatron_training": kept, **sections}))


def _layouts(model: ModelConfig, cluster: Cluster, devices: int) -> Iterator[Overrides]:
    """Combinations of parallel sizes that could be legal; the rules have the last word.

    Tensor and expert parallelism stay within a node, as their collectives wait for each other in every layer.
    """
    node = min(cluster.devices_per_node, devices)
    sizes = [size for size in _powers(node) if model.num_attention_heads % size == 0]
    for tp in sizes:
        for pp in (size for size in _powers(devices // tp) if size <= model.num_layers):
            for cp in _powers(min(8, devices // (tp * pp))):
                for ep in _expert_sizes(model, devices // (tp * pp)):
                    for infer_tp in sizes:
                        yield {
                            "actor_config.tensor_model_parallel_size": tp,
                            "actor_config.sequence_parallel": tp > 1,
                            "actor_config.pipeline_model_parallel_size": pp,
                            "actor_config.context_parallel_size": cp,
                            "actor_config.expert_model_parallel_size": ep,
                            "generate_config.infer_tensor_parallel_size": infer_tp,
                        }


def _expert_sizes(model: ModelConfig, ranks: int) -> list[int]:
    experts = model.num_moe_experts
    return [size for size in _powers(ranks) if experts % size == 0] if experts else [1]


def _powers(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


def _rooms(base: Mapping[str, Any], model: ModelConfig) -> Iterator[Overrides]:
    """What takes more and more time for less and less memory: offloading, recomputation, smaller micro-batches."""
    actor = {**base.get("megatron_training", {}), **base.get("actor_config", {})}
    longest = actor.get("seq_length", 1024)
    caps = sorted({max(longest, LEAST_TOKENS), max(longest, LEAST_TOKENS // 2), longest}, reverse=True)
    recompute: Sequence[tuple[Any, Any, Any]] = [
        (None, None, None),
        ("full", "block", -(-model.num_layers // 2)),
        ("full", "uniform", 1),
    ]
    for names in ((), OFFLOADS[:1], OFFLOADS):
        for settings in recompute:
            for cap in caps:
                yield {
                    **{f"generate_config.{name}": name in names for name in OFFLOADS},
                    **dict(zip((f"actor_config.{name}" for name in RECOMPUTE), settings, strict=True)),
                    "rl_config.max_packing_token_size": cap,
                }


def _changed(base: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """The composed configuration with other values; None takes a key away, so that its default holds."""
    raw: dict[str, Any] = copy.deepcopy(dict(base))
    for path, value in overrides.items():
        section, _, key = path.rpartition(".")
        holder = raw.setdefault(section, {}) if section else raw
        if value is None:
            holder.pop(key, None)
        else:
            holder[key] = value
    return raw
