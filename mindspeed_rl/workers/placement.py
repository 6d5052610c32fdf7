"""Where the ranks of a run live: a tensor-parallel group is one bundle of a placement group, so on one node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from mindspeed_rl.common.errors import ConfigError, Violation, WorkerFailed
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.base import Device


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, by Ray's id of it."""

    id: str
    address: str
    devices: int = 0  # of the kind that the run takes
    lost: str | None = None  # why it is no longer there

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:8]})"


@dataclass(frozen=True)
class World:
    """Ranks that form a world; `group` neighbours must be close, because they share the weights of every layer."""

    key: str  # of the configuration, that says how many there are
    ranks: int
    group: int


@dataclass(frozen=True)
class Slot:
    """The place of one rank."""

    bundle: int
    node: Node


def worlds_of(layout: Layout) -> list[World]:
    """What a run needs: those that train, and those that generate, if they are others."""
    key = "rl_config.actor_resource.num_npus"
    if layout.integrated:
        return [World(key, layout.world, math.lcm(layout.tp, layout.infer_tp))]
    rollout = World("rl_config.rollout_resource.num_npus", layout.rollout_world, layout.infer_tp)
    return [World(key, layout.world, layout.tp), rollout]


def cluster_nodes(resource: str | None = None) -> list[Node]:
    """All nodes that Ray knows, lost ones too.

    Args:
        resource: Ray's name of the devices; None: a device is a CPU.
    """
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get(resource or "CPU", 0)),
            None if node["Alive"] else node.get("DeathReasonMessage") or "it does not answer",
        )
        for node in ray.nodes()
    ]


def fit(worlds: Sequence[World], nodes: Sequence[Node], device: str) -> list[int]:
    """Devices of a bundle of each world: its group, or 1 where no node is large enough for one.

    Raises:
        ConfigError: there are too few devices, or they lie so that a group would have to cross nodes.
    """
    free = Counter({node.id: node.devices for node in nodes})
    largest = max(free.values(), default=0)
    sizes = [world.group if world.group <= largest else 1 for world in worlds]
    # the largest first: with sizes that divide each other, as those of groups do, nothing fits better
    for world, size in sorted(zip(worlds, sizes, strict=True), key=lambda each: -each[1]):
        bundles = world.ranks // size
        for node in nodes:
            taken = min(bundles, free[node.id] // size)
            bundles, free[node.id] = bundles - taken, free[node.id] - taken * size
        if bundles:
            total, has = sum(each.ranks for each in worlds), ", ".join(f"{n.address} has {n.devices}" for n in nodes)
            message = f"the run takes {total} {device} devices, in groups of {size} on one node; {has or 'no nodes'}"
            hint = "use fewer, add nodes, or make tensor-parallel groups smaller"
            raise ConfigError([Violation(world.key, world.ranks, message, hint)])
    return sizes


class Placement:
    """Holds a run's devices until it ends. Ranks that follow each other are on one node, as far as it goes.

    Args:
        config: the run's configuration.
        layout: its parallel layout.
        device: kind of device.

    Raises:
        ConfigError: the cluster does not have the devices; names nodes and devices.
        WorkerFailed: they are not free in time.
    """

    def __init__(self, config: Config, layout: Layout, device: Device):
        worlds, self._resource = worlds_of(layout), device.ray_resource
        minutes = config.rl_config.start_timeout_minutes
        try:
            sizes = self._fit(worlds)
        except ConfigError:
            minutes = config.ray.nodes_timeout_minutes
            if not minutes:
                raise
            sizes = [world.group for world in worlds]  # a group that waits is what an autoscaler goes by
        bundles = [
            self.resources(size)
            for world, size in zip(worlds, sizes, strict=True)
            for _ in range(world.ranks // size)
        ]
        self.group: PlacementGroup = placement_group(bundles, strategy="PACK")
        if not self.group.wait(60 * minutes):
            remove_placement_group(self.group)  # else it would take the devices later, for nobody
            self._fit(worlds)
            what = self._resource or "CPU"
            free = f"{ray.available_resources().get(what, 0):g} {what} devices of the cluster are free"
            reason = f"not finished after {minutes:g} minutes: {free}"
            raise WorkerFailed(0, "start (waiting for a device)", 0, reason)
        self.slots = self._slots(worlds, sizes)

    def _fit(self, worlds: Sequence[World]) -> list[int]:
        nodes = [node for node in cluster_nodes(self._resource) if node.lost is None]
        return fit(worlds, nodes, self._resource or "CPU")

    def resources(self, ranks: int = 1) -> dict[str, float]:
        """What ranks take of a node, by Ray's names."""
        resources = {"CPU": float(ranks)}
        return {**resources, self._resource: float(ranks)} if self._resource else resources

    def _slots(self, worlds: Sequence[World], sizes: Sequence[int]) -> list[Slot]:
        """Of every rank, worlds one after the other; bundles of a node follow each other, this node's first."""
        here = ray.get_runtime_context().get_node_id()
        nodes = {node.id: node for node in cluster_nodes(self._resource)}
        node_ids, slots, first = placement_group_table(self.group)["bundles_to_node_id"], list[Slot](), 0
        for world, size in zip(worlds, sizes, strict=True):
            last = first + world.ranks // size
            bundles = [Slot(bundle, nodes[node_ids[bundle]]) for bundle in range(first, last)]
            bundles.sort(key=lambda slot: (slot.node.id != here, slot.node.address, slot.node.id, slot.bundle))
            slots += [slot for slot in bundles for _ in range(size)]
            first = last
        return slots

    def options(self, rank: int) -> dict[str, Any]:
        """Of the actor of a rank, counted among all of the run: what it takes, and from where."""
        taken = self.resources()
        return {
            "num_cpus": taken.pop("CPU"),
            "num_gpus": taken.pop("GPU", 0),
            "resources": taken,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.slots[rank].bundle),
        }


def beside_the_driver() -> NodeAffinitySchedulingStrategy:
    """For what the run cannot do without: it is lost only with the driver's own node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
