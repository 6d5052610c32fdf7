"""Whole iterations through all planes, by 1 to 16 producing and as many consuming processes.

An iteration is: begin, all producers put their rows, all consumers take theirs, clear. Producers and consumers are
Ray actors, the same ones for all planes, whose rounds alternate: noise of the machine and warm memory are shared
alike. Each process takes first the one, then the other part, as workers of a training run do, but never consumes what
it produced; a single producer and consumer are two processes. A phase lasts from the first process's start to the
last one's end, on the host's monotonic clock: what it takes Ray to start the two phases is not counted for any plane.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from dock.planes import Batch, Clock, Dock, Plane, RawRay, RayFromRows, TransferQueue, Turn
from dock.workload import GROUP, Workload, checksum, grpo_spec
from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock

DOCKS = ("dock_packed", "dock")
CALLS = ("claim", "get", "read", "ack")


@dataclass(frozen=True)
class Phase:
    """One process's part of a phase; times are `time.monotonic_ns`."""

    start: int
    stop: int
    seconds: dict[str, float]
    handed_over: list[ray.ObjectRef]
    checksum: int


class Worker:
    """A producing or consuming process with all planes in it."""

    def __init__(self, dock: RayTransferDock, with_queue: bool):
        self._planes: dict[str, Plane] = {
            "ray": RawRay(),
            "dock_packed": Dock(dock, packed=True),
            "ray_from_rows": RayFromRows(),
            "dock": Dock(dock, packed=False),
        }
        if with_queue:
            self._planes["transferqueue"] = TransferQueue()

    def prepare(self, workload: Workload, part: int, parts: int, batch_rows: int) -> int:
        """Make the values of this producer's rows; returns their checksum."""
        for plane in self._planes.values():
            plane.prepared = None  # the values of the case before, which may be large
        rows = workload.rows(part, parts)
        starts = range(rows.start, rows.stop, batch_rows)
        batches = [Batch(range(s, s + batch_rows), workload.columns(range(s, s + batch_rows))) for s in starts]
        for plane in self._planes.values():
            plane.prepare(batches, workload.nbytes(rows))
        return sum(checksum(batch.columns) for batch in batches)

    def produce(self, plane: str, iteration: int) -> Phase:
        """Put all prepared rows."""
        clock, start = Clock(), time.monotonic_ns()
        refs = self._planes[plane].produce(iteration, clock)
        return Phase(start, time.monotonic_ns(), dict(clock.seconds), refs, 0)

    def consume(self, plane: str, turn: Turn, handed_over: list[ray.ObjectRef]) -> Phase:
        """Take all rows of a share."""
        clock, start = Clock(), time.monotonic_ns()
        total = self._planes[plane].consume(turn, handed_over, clock)
        return Phase(start, time.monotonic_ns(), dict(clock.seconds), [], total)


@dataclass(frozen=True)
class Round:
    """Seconds of one iteration of one plane. `calls`: seconds in a kind of call, mean over the processes."""

    begin: float
    put: float
    consume: float
    clear: float
    calls: dict[str, float]
    controller_cpu: float

    @property
    def iteration(self) -> float:
        """From begin to clear."""
        return self.begin + self.put + self.consume + self.clear


Rounds = dict[tuple[str, bool], list[Round]]


class Bench:
    """A dock, and `processes` processes that produce and as many that consume, for any workload."""

    def __init__(self, processes: int, queue: TransferQueue | None):
        self.processes = processes
        self.planes = ("ray", "dock_packed", "ray_from_rows", "dock", *(["transferqueue"] if queue else []))
        self._queue = queue
        self._dock = RayTransferDock.create(grpo_spec(processes), num_cpus=0)
        actor: Any = ray.remote(num_cpus=0)(Worker)
        self._workers = [actor.remote(self._dock, queue is not None) for _ in range(max(2, processes))]
        self._producers = self._workers[:processes]
        self._consumers = [*self._workers[1:], self._workers[0]][:processes]
        self._controllers = dict.fromkeys(DOCKS, controller_process(self._dock))
        if queue:
            self._controllers["transferqueue"] = queue.controller_process()
        self._iteration = 0

    def run(self, workload: Workload, batch_rows: int, warm_up: int, repetitions: int) -> Rounds:
        """Rounds by (plane, read), in turns, after `warm_up` turns that do not count.

        Raises `RuntimeError` if a plane delivered other token ids than were put.
        """
        parts = self.processes
        calls = [p.prepare.remote(workload, part, parts, batch_rows) for part, p in enumerate(self._producers)]
        expected = sum(ray.get(calls))
        rounds: Rounds = {(plane, read): [] for read in (False, True) for plane in self.planes}
        for turn in range(warm_up + repetitions):
            for plane, read in rounds:
                result, total = self._round(plane, workload, batch_rows, read)
                if read and plane in (*DOCKS, "transferqueue") and total != expected:
                    raise RuntimeError(
                        f"{plane} delivered values that sum to {total}; what was put sums to {expected}"
                    )
                if turn >= warm_up:
                    rounds[plane, read].append(result)
        return rounds

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            ray.kill(worker)

    def _round(self, plane: str, workload: Workload, batch_rows: int, read: bool) -> tuple[Round, int]:
        self._iteration += 1
        number, watch = self._iteration, Clock()
        process = self._controllers.get(plane)
        cpu = cpu_seconds(process)
        with watch("begin"):
            if plane in DOCKS:
                self._dock.begin(number, workload.samples // GROUP, GROUP, block_rows=workload.samples)
        put = ray.get([producer.produce.remote(plane, number) for producer in self._producers])
        rows = workload.samples // self.processes
        consumed = ray.get(
            [
                consumer.consume.remote(plane, Turn(number, share, rows, batch_rows, read), put[share].handed_over)
                for share, consumer in enumerate(self._consumers)
            ]
        )
        with watch("clear"):
            if plane in DOCKS:
                self._dock.clear(number)
            elif plane == "transferqueue":
                assert self._queue is not None
                self._queue.clear(number)
        result = Round(
            begin=watch.seconds["begin"],
            put=_wall(put),
            consume=_wall(consumed),
            clear=watch.seconds["clear"],
            calls={name: statistics.fmean(phase.seconds.get(name, 0.0) for phase in consumed) for name in CALLS},
            controller_cpu=cpu_seconds(process) - cpu,
        )
        return result, sum(phase.checksum for phase in consumed)


def _wall(phases: Sequence[Phase]) -> float:
    return (max(phase.stop for phase in phases) - min(phase.start for phase in phases)) / 1e9


def median(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    """Median of a value of rounds."""
    return statistics.median(map(value, rounds))


def controller_process(dock: RayTransferDock) -> psutil.Process:
    """The process of a dock's controller."""
    return psutil.Process(ray.get(dock._controller.__ray_call__.remote(lambda _: os.getpid())))


def cpu_seconds(process: psutil.Process | None) -> float:
    """User and system time of a process so far, in steps of 10 ms."""
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system
