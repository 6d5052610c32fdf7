"""Layouts that a configuration could have on a cluster, the fastest first."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.compose import put, validate
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import Layout, derive_layout
from mindspeed_rl.config.memory import FLOAT32, GIB, rollout_parameters
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import OF_REWARD_MODEL, OFFLOADS
from mindspeed_rl.config.rules_memory import (
    LIMIT,
    estimate,
    shortages,
    with_generation,
    with_rl,
    with_training,
)
from mindspeed_rl.config.schema import Config
from mindspeed_rl.planner.cluster import Cluster
from mindspeed_rl.planner.step import StepTime, Work, step_time

Overrides = dict[str, Any]  # key path -> value
LEAST_TOKENS = 16384  # of a micro-batch, if memory allows: below that, products lose speed
MOST_CP = 8
HALF = 2  # bytes of a weight in half precision
LEAST_SHARE, MOST_SHARE = 0.05, 0.9  # of memory, for the rollout engine
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@dataclass(frozen=True)
class Plan:
    """A configuration that passes all rules, memory included, and how long its iterations take."""

    overrides: Overrides  # what makes it of the configuration that was asked about, beside `WITHOUT`
    layout: Layout
    time: StepTime


@dataclass(frozen=True)
class Search:
    """What was found."""

    plans: list[Plan]  # the fastest first
    tried: int
    refused: Counter[str]  # by key path: how many combinations broke a rule there


def search(
    base: Mapping[str, Any], cluster: Cluster, devices: int, work: Work, staleness: int | None = None
) -> Search:
    """Try the layouts that `devices` allow.

    Args:
        base: a composed configuration, valid or not: what the search sets may be what is wrong with it.
        cluster: the type of its devices.
        devices: how many.
        work: lengths and rewards.
        staleness: rollout gets devices of its own and may be so many iterations ahead; None: integrated workers.

    Raises:
        ConfigError: no layout fits; it says what one of them lacks.
    """
    candidates = _Candidates(base, cluster, integrated=staleness is None)
    plans = list[Plan]()
    for sizes in _layouts(candidates.model, cluster, devices, staleness):
        if candidates.is_too_large(sizes):
            continue
        layout = {**sizes, **_whole_experts(base, sizes)}
        fastest = candidates.fastest(layout)
        if fastest is not None:
            overrides, cfg = fastest
            found = derive_layout(cfg)
            plans.append(Plan(overrides, found, step_time(cfg, candidates.model, found, cluster, work)))
    if not plans:
        raise candidates.nearest(devices)
    return Search(sorted(plans, key=lambda plan: plan.time.total), candidates.tried, candidates.refused)


class _Candidates:
    """Combinations of overrides, and why some are no plans."""

    def __init__(self, base: Mapping[str, Any], cluster: Cluster, integrated: bool):
        self.base, self.cluster, self.model = base, cluster, _model(base)
        self.rooms = list(_rooms(base, self.model, integrated))
        self.tried, self.refused = 0, Counter[str]()
        self._near: Overrides = {}  # one that lacks memory alone, if there is one

    def fastest(self, layout: Overrides) -> tuple[Overrides, Config] | None:
        """The layout with what makes it fit and takes least time for that; None: nothing does, or a rule forbids."""
        frugal = self.rooms[-1]
        settings = {"device": self.cluster.device, "rl_config.use_dynamic_bsz": True, **layout}
        cfg = self._valid({**settings, **frugal, LIMIT: None})  # without a limit: remedies are not asked for
        if cfg is None:
            return None
        limited = cfg.model_copy(update={LIMIT: self.cluster.memory_gib})
        if self._share(limited) is None:
            self._near = {**settings, **frugal, LIMIT: self.cluster.memory_gib}
            self.tried, self.refused[LIMIT] = self.tried + 1, self.refused[LIMIT] + 1
            return None
        for room in self.rooms:  # the first that fits is the fastest
            share = self._share(_with_room(limited, room))
            self.tried += 1
            if share is None:
                self.refused[LIMIT] += 1
                continue
            memory = {LIMIT: self.cluster.memory_gib, "generate_config.gpu_memory_utilization": share}
            overrides = {**settings, **room, **memory}
            if (valid := self._valid(overrides)) is not None:
                return overrides, valid
        return None

    def _valid(self, overrides: Overrides) -> Config | None:
        try:
            return validate(self.changed(overrides))
        except ConfigError as error:
            self.tried += 1
            self.refused.update({violation.path for violation in error.violations})
            self._near = self._near or overrides
            return None

    def _share(self, cfg: Config) -> float | None:
        """What the rollout engine can have of memory; None: something does not fit whatever it has."""
        memory, limit = estimate(cfg, self.model), self.cluster.memory_gib * GIB
        left = 1 - (memory.training_kept + memory.beside_rollout) / limit
        share = max(LEAST_SHARE, min(MOST_SHARE, math.floor(left / LEAST_SHARE) * LEAST_SHARE))
        fits = not any(shortages(with_generation(cfg, gpu_memory_utilization=share), memory))
        return round(share, 2) if fits else None

    def is_too_large(self, sizes: Overrides) -> bool:
        """Weights alone do not fit, or those of training with their gradients: known without a configuration."""
        tp, pp, ep = (sizes[f"actor_config.{kind}_model_parallel_size"] for kind in ("tensor", "pipeline", "expert"))
        experts, infer_tp = self.model.expert_parameters, sizes["generate_config.infer_tensor_parallel_size"]
        trained = (self.model.num_parameters - experts + experts / ep) / (tp * pp)
        rollout = rollout_parameters(self.model, infer_tp)
        too_large = max(trained * (HALF + FLOAT32), rollout * HALF / MOST_SHARE) > self.cluster.memory_gib * GIB
        self.tried, self.refused[LIMIT] = self.tried + too_large, self.refused[LIMIT] + too_large
        return too_large

    def nearest(self, devices: int) -> ConfigError:
        """What is wrong with one of the combinations, or that there is none."""
        if not self._near:
            needed = f"of {self.cluster.memory_gib:g} GiB cannot hold the weights"
            return ConfigError([Violation("--devices", devices, needed, "use more")])
        try:
            validate(self.changed(self._near))
        except ConfigError as error:
            return error
        raise AssertionError("it was refused before")

    def changed(self, overrides: Overrides) -> dict[str, Any]:
        """The composed configuration with other values."""
        raw: dict[str, Any] = copy.deepcopy(dict(self.base))
        for path in WITHOUT:
            section, _, key = path.rpartition(".")
            raw.get(section, {}).pop(key, None)
        return put(raw, overrides)


def _with_room(cfg: Config, room: Overrides) -> Config:
    changes = {"generate_config": with_generation, "actor_config": with_training, "rl_config": with_rl}
    for section, change in changes.items():
        values = {path.rpartition(".")[2]: value for path, value in room.items() if path.startswith(f"{section}.")}
        cfg = change(cfg, **values)
    return cfg


def _whole_experts(base: Mapping[str, Any], sizes: Overrides) -> Overrides:
    """Engines of several devices hold whole experts where the configuration wants that."""
    section, devices = "generate_config", sizes["generate_config.infer_tensor_parallel_size"]
    if not base.get(section, {}).get("enable_expert_parallel"):
        return {}
    return {f"{section}.enable_expert_parallel": devices > 1, f"{section}.infer_expert_parallel_size": devices}


# Pipeline stages that are not those of another layout; and tokens of a micro-batch, not sequences, decide about speed
# and memory: a cap of tokens takes the place of the latter.
WITHOUT = (
    *(
        f"{section}.{key}"
        for section in ("megatron_training", "actor_config")
        for key in ("num_layer_list", "noop_layers", "num_layers_per_virtual_pipeline_stage")
    ),
    "megatron_training.micro_batch_size",
    "actor_config.micro_batch_size",
    *(f"rl_config.{model}_forward_micro_batch_size" for model in ("actor", "ref", "critic")),
    "reward_config.micro_batch_size",
)


def _model(base: Mapping[str, Any]) -> ModelConfig:
    """Of the configuration, whatever else is wrong with it."""
    sections = {key: base[key] for key in ("model",) if key in base}
    named = {**base.get("megatron_training", {}), **base.get("actor_config", {})}
    kept = {key: named[key] for key in ("model", "load") if key in named}
    return resolve_model(Config.model_validate({"megatron_training": kept, **sections}))


def _layouts(model: ModelConfig, cluster: Cluster, devices: int, staleness: int | None) -> Iterator[Overrides]:
    """Combinations of parallel sizes that could be legal; the rules have the last word.

    Training's tensor parallelism stays within a node: its collectives wait for each other in every layer.
    """
    for workers, training in _divisions(devices, staleness):
        sizes = [size for size in _powers(devices) if model.num_attention_heads % size == 0]
        node = [size for size in sizes if size <= min(cluster.devices_per_node, training)]
        for tp, infer_tp in product(node, sizes):
            for pp in (size for size in _powers(training // tp) if size <= model.num_layers):
                for cp in _powers(min(MOST_CP, training // (tp * pp))):
                    for ep in _expert_sizes(model, training // (tp * pp)):
                        yield {
                            **workers,
                            "actor_config.tensor_model_parallel_size": tp,
                            "actor_config.sequence_parallel": tp > 1,
                            "actor_config.pipeline_model_parallel_size": pp,
                            "actor_config.num_layer_list": _uneven(model.num_layers, pp),
                            "actor_config.context_parallel_size": cp,
                            "actor_config.expert_model_parallel_size": ep,
                            "generate_config.infer_tensor_parallel_size": infer_tp,
                        }


def _divisions(devices: int, staleness: int | None) -> Iterator[tuple[Overrides, int]]:
    """Which devices train and which generate, and how many train."""
    keys = ("use_integrated_worker", "staleness", "actor_resource", "rollout_resource")
    if staleness is None:
        values: list[tuple[bool, int, dict[str, int], dict[str, int] | None]]
        values = [(True, 0, {"num_npus": devices}, None)]
    else:
        shares = sorted({devices * quarters // 4 for quarters in (1, 2, 3)} - {0, devices})
        values = [(False, staleness, {"num_npus": devices - share}, {"num_npus": share}) for share in shares]
    for each in values:
        yield dict(zip((f"rl_config.{key}" for key in keys), each, strict=True)), each[2]["num_npus"]


def _uneven(layers: int, stages: int) -> str | None:
    """Layers of each stage, if they cannot be divided evenly: more in the middle, as both ends have other work."""
    least, more = divmod(layers, stages)
    if not more or stages == 1:
        return None
    first = (stages - more) // 2
    return ",".join(str(least + (first <= stage < first + more)) for stage in range(stages))


def _expert_sizes(model: ModelConfig, ranks: int) -> list[int]:
    experts = model.num_moe_experts
    return [size for size in _powers(ranks) if experts % size == 0] if experts else [1]


def _powers(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


def _rooms(base: Mapping[str, Any], model: ModelConfig, integrated: bool) -> Iterator[Overrides]:
    """What takes more and more time for less and less memory: offloading, recomputation, smaller micro-batches."""
    actor = {**base.get("megatron_training", {}), **base.get("actor_config", {})}
    longest = actor.get("seq_length", 1024)
    caps = sorted({max(longest, LEAST_TOKENS), max(longest, LEAST_TOKENS // 2), longest}, reverse=True)
    recompute: Sequence[tuple[Any, Any, Any]] = [
        (None, None, None),
        ("full", "block", -(-model.num_layers // 2)),
        ("full", "uniform", 1),
    ]
    offloads = (*OFFLOADS, OF_REWARD_MODEL) if base.get("reward_config", {}).get("load") else OFFLOADS
    for names in ((), offloads[:1], offloads) if integrated else ((),):
        for settings in recompute:
            for cap in caps:
                yield {
                    **{f"generate_config.{name}": name in names for name in offloads},
                    **dict(zip((f"actor_config.{name}" for name in RECOMPUTE), settings, strict=True)),
                    "rl_config.max_packing_token_size": cap,
                }
