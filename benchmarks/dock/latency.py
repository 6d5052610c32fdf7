"""How long a waiting consumer sleeps on after a put, against what one call of a bare Ray actor takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch

from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock
from mindspeed_rl.transfer_dock.spec import ColumnSpec, ConsumerSpec, DockSpec

ROW = torch.arange(512)  # 4 KB
PAUSE_S = 0.01  # between two puts: long enough for the consumer to wait again


class Echo:
    """An asyncio actor that does nothing."""

    async def ping(self) -> None:
        """Answer."""


class Process:
    """A producer, a consumer, or a caller of `Echo`."""

    def __init__(self, dock: RayTransferDock, echo: Any):
        self._dock, self._echo = dock, echo

    def consume(self, rows: int) -> list[int]:
        """Claim rows one by one; the time of every return, `monotonic_ns`, which all processes of a host share."""
        returned = []
        for _ in range(rows):
            claim = self._dock.claim("train", 0, 1)
            returned.append(time.monotonic_ns())
            assert claim is not None
            self._dock.ack(claim)
        return returned

    def produce(self, rows: int) -> list[int]:
        """Put rows one by one, with pauses; the times just before every put."""
        started = []
        for row in range(rows):
            time.sleep(PAUSE_S)
            started.append(time.monotonic_ns())
            self._dock.put(0, [row], {"tokens": [ROW]})
        return started

    def call(self, times: int) -> list[int]:
        """Durations of calls of the bare actor, with the same pauses; ns."""
        durations = []
        for _ in range(times):
            time.sleep(PAUSE_S)
            start = time.monotonic_ns()
            ray.get(self._echo.ping.remote())
            durations.append(time.monotonic_ns() - start)
        return durations


def measure(repetitions: int, warm_up: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds [repetitions] from put to the waiting claim's return, and of a bare actor call."""
    total = repetitions + warm_up
    spec = DockSpec({"tokens": ColumnSpec("int64")}, {"train": ConsumerSpec(("tokens",))})
    dock = RayTransferDock.create(spec, num_cpus=0)
    actor: Any = ray.remote(Echo)
    echo = actor.options(num_cpus=0, max_concurrency=1000).remote()
    actor = ray.remote(num_cpus=0)(Process)
    producer, consumer = (actor.remote(dock, echo) for _ in range(2))
    ray.get([process.call.remote(1) for process in (producer, consumer)])
    dock.begin(0, total, 1, block_rows=total)
    returned = consumer.consume.remote(total)
    started = producer.produce.remote(total)
    wake_up = np.subtract(ray.get(returned), ray.get(started))
    calls = np.array(ray.get(producer.call.remote(total)))
    for process in (producer, consumer, echo):
        ray.kill(process)
    return wake_up[warm_up:] / 1e6, calls[warm_up:] / 1e6


def percentiles(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """p50 and p99."""
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99)
