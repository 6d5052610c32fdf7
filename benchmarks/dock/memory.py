"""Where the bytes of an iteration are: in the object store once, in no controller, in no reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray._private.internal_api import node_stats

from dock.metadata import private_bytes
from dock.planes import NAMES
from dock.throughput import controller_process
from dock.workload import GROUP, Workload, grpo_spec
from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock


@dataclass(frozen=True)
class Footprint:
    """Bytes of one iteration, after every row has been put, claimed and read."""

    payload: int
    store: int  # objects in the object store
    reader: int  # growth of the reading process's private memory while it holds and has summed all rows
    controller: int  # growth of the controller's private memory


class Process:
    """A producer or a reader."""

    def __init__(self, dock: RayTransferDock):
        self._dock = dock
        self._held: list[Any] = []

    def produce(self, workload: Workload, batch_rows: int) -> None:
        """Put all rows of iteration 0."""
        for start in range(0, workload.samples, batch_rows):
            rows = range(start, start + batch_rows)
            self._dock.put(0, rows, workload.columns(rows))

    def read(self, batch_rows: int) -> int:
        """Claim, hold and sum all rows; by how much private memory grew, in bytes."""
        before = private_bytes()
        while (claim := self._dock.claim("update", 0, batch_rows)) is not None:
            values = self._dock.get(claim, NAMES)
            for name in NAMES:
                for value in values[name]:
                    value.sum()
            self._held.append(values)
            self._dock.ack(claim)
        return private_bytes() - before


def measure(workload: Workload, batch_rows: int) -> Footprint:
    """One iteration through a dock of its own."""
    dock = RayTransferDock.create(grpo_spec(shares=1), num_cpus=0)
    pid = controller_process(dock).pid
    actor: Any = ray.remote(num_cpus=0)(Process)
    producer, reader = (actor.remote(dock) for _ in range(2))
    ray.get(reader.__ray_ready__.remote())
    before, store_before = private_bytes(pid), _store_bytes()
    dock.begin(0, workload.samples // GROUP, GROUP, block_rows=workload.samples)
    ray.get(producer.produce.remote(workload, batch_rows))
    grown = ray.get(reader.read.remote(batch_rows))
    footprint = Footprint(workload.total_bytes, _store_bytes() - store_before, grown, private_bytes(pid) - before)
    for process in (producer, reader):
        ray.kill(process)
    return footprint


def _store_bytes() -> int:
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return stats.store_stats.object_store_bytes_used
