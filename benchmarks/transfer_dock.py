"""The TransferDock against its limit (bare Ray) and its peer (PyPI `transferqueue`), in one run.

    python benchmarks/transfer_dock.py                     # everything
    python benchmarks/transfer_dock.py --only idle         # wake-up, memory, metadata: needs an idle machine; minutes
    python benchmarks/transfer_dock.py --only throughput   # whole iterations: half an hour
    python benchmarks/transfer_dock.py --quick             # to see that all works: small, not written

The peer needs `pip install --no-deps -r requirements/benchmarks.txt`; without it, its figures are left out and the
records say so.

What the headlines mean
- `dock.iteration_vs_ray`: seconds of `ray.put` and `ray.get` of one array of the same bytes, packed beforehand, over
  seconds of the dock's whole iteration (begin, put, claim, get, acknowledge, clear), from one process to another. The
  dock gets all rows in one put and one claim, each column packed beforehand (`Jagged`).
- `dock.iteration_vs_ray_from_rows`: as above, but both start from rows, as lists of tensors: bare Ray concatenates
  every column, into memory that it uses again.
- `dock.iteration_vs_transferqueue`: seconds of its put, metadata, get and clear over the dock's, from rows.
Each is the lower of two figures, one with what a consumer got only mapped, one with all of it packed and summed.
Records `dock.ratio_to_…` have both, for every case, also for 64 rows a put and claim (where bare Ray still moves all
rows of a process at once).
`limit` is bare Ray with one array packed beforehand, `peer` TransferQueue.

How it is measured: `dock/throughput.py`; the drivers: `dock/planes.py`; the samples: `dock/workload.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches benchmarks/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
from dock import latency, memory, metadata
from dock.cluster import cluster
from dock.planes import TransferQueue
from dock.throughput import Bench, Round, Rounds, median
from dock.workload import Workload
from records import ROOT, Record, cpu_name, publish

ABSENT = "NOT MEASURED: transferqueue is not installed (pip install --no-deps -r requirements/benchmarks.txt)"
PLOT = ROOT / "benchmarks" / "results" / "transfer_dock_claim_cost.svg"


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    samples: dict[int, tuple[int, int]]  # samples: (warm-up turns, turns that count)
    processes: tuple[int, ...]  # producers, and as many consumers
    wake_ups: int
    table_rows: tuple[int, ...]
    claims: int  # timed for each of these
    batch_rows: int = 64  # a put and a claim, beside all rows of a process at once


FULL = Settings({1024: (3, 15), 16384: (2, 3)}, (1, 4, 16), 500, (1_000, 10_000, 100_000, 1_000_000), 2000)
QUICK = Settings({1024: (2, 3)}, (1, 4), 100, (1_000, 10_000), 500)


@dataclass(frozen=True)
class Case:
    """One setting of the throughput runs, and its rounds."""

    workload: Workload
    processes: int
    batch_rows: int
    rounds: Rounds

    def __str__(self) -> str:
        return (
            f"{self.workload.samples} samples, {self.workload.total_bytes / 1e6:.1f} MB, from {self.processes} to "
            f"{self.processes} processes on {os.cpu_count()} cores, {self.batch_rows} rows a put and claim"
        )

    def seconds(self, plane: str, read: bool) -> float:
        """Median of an iteration."""
        return median(self.rounds[plane, read], lambda round_: round_.iteration)

    def ratio(self, plane: str, read: bool) -> float:
        """A plane's time over the dock's, with values packed beforehand if they are for that plane."""
        return self.seconds(plane, read) / self.seconds("dock_packed" if plane == "ray" else "dock", read)


def measure_idle(settings: Settings) -> list[Record]:
    """What is measured while nothing else runs. Starts a Ray of its own."""
    with cluster(reserve(settings)):
        return [*wake_up_records(settings), *memory_records(settings), *metadata_records(settings)]


def measure_throughput(settings: Settings, with_queue: bool) -> list[Record]:
    """Whole iterations. Starts a Ray of its own."""
    with cluster(reserve(settings)):
        cases = list(run_cases(settings, with_queue))
    headlines = [case for case in cases if case.batch_rows == case.workload.samples]
    return [
        *(record for case in headlines for record in headline_records(case)),
        *(record for case in cases for record in case_records(case)),
    ]


def reserve(settings: Settings) -> int:
    """Size of the object store; ends the program if there is not enough memory for all that will run."""
    largest = Workload(max(settings.samples)).total_bytes
    store = 4 * largest + (256 << 20)  # objects of finished iterations are freed a little later
    # a process with torch and the peer takes 0.5 GB; values are held as rows, packed, and in the peer's storage
    total = max(settings.processes) * (500 << 20) + 8 * largest + store
    for place, needed, free in (
        ("the object store in /dev/shm", store, shutil.disk_usage("/dev/shm").free),
        ("memory", total, psutil.virtual_memory().available),
    ):
        if needed > free:
            raise SystemExit(f"{place}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    return store


def wake_up_records(settings: Settings) -> Iterator[Record]:
    """From just before a put in one process to the return of the claim that waits in another."""
    waits, calls = latency.measure(settings.wake_ups)
    note = f"put of one row of 4 KB, {settings.wake_ups} times, idle machine; limit: one call of a bare Ray actor"
    for name, wait, call in zip(("p50", "p99"), latency.percentiles(waits), latency.percentiles(calls), strict=True):
        yield Record(f"dock.wakeup_{name}_ms", wait, "ms", limit=call, note=note)


def memory_records(settings: Settings) -> Iterator[Record]:
    """Bytes in the object store, the reader and the controller for every byte of payload."""
    workload = Workload(max(settings.samples))
    found = memory.measure(workload, settings.batch_rows)
    note = f"{workload.samples} samples, {found.payload / 1e6:.1f} MB of payload, all put, claimed, held and summed"
    yield Record("dock.store_bytes_per_payload_byte", found.store / found.payload, "", limit=1.0, note=note)
    for name, grown in (("reader", found.reader), ("controller", found.controller)):
        text = f"growth of the {name}'s private memory; {note}"
        yield Record(f"dock.{name}_bytes_per_payload_byte", grown / found.payload, "", limit=0.0, note=text)


def metadata_records(settings: Settings) -> Iterator[Record]:
    """Memory a row of metadata takes, and the cost of a claim by table size, which is plotted by a full run."""
    costs = metadata.measure(settings.table_rows, settings.claims)
    rows = max(costs)
    note = f"state of {rows} rows with 6 consumers and addresses of 6 puts for every {metadata.BATCH} rows"
    yield Record("dock.controller_mb_per_million_rows", costs[rows].nbytes / rows, "MB", note=note)
    for rows, cost in costs.items():
        note = (
            f"median of claims of {metadata.BATCH} rows, acknowledged, in the controller; iteration of {rows} rows; "
            f"mean {cost.claim_mean_us:.0f}"
        )
        yield Record("dock.claim_us", cost.claim_median_us, "µs", note=note)
    if settings == FULL:
        metadata.plot({rows: cost.claim_median_us for rows, cost in costs.items()}, PLOT)


def run_cases(settings: Settings, with_queue: bool) -> Iterator[Case]:
    """Throughput runs, fewest processes first."""
    queue = TransferQueue() if with_queue else None
    for processes in settings.processes:
        bench = Bench(processes, queue)
        for samples, (warm_up, repetitions) in settings.samples.items():
            share = samples // processes
            for batch_rows in sorted({share, min(settings.batch_rows, share)}, reverse=True):
                workload = Workload(samples)
                rounds = bench.run(workload, batch_rows, warm_up, repetitions)
                yield Case(workload, processes, batch_rows, rounds)
        bench.close()
    if queue:
        queue.close()


def headline_records(case: Case) -> Iterator[Record]:
    """The three ratios that the module's docstring defines, for one number of samples."""
    for plane in ("ray", "ray_from_rows", "transferqueue"):
        name = f"dock.iteration_vs_{plane}"
        if (plane, False) not in case.rounds:
            yield Record(name, 0.0, "", note=ABSENT)
            continue
        mapped, read = case.ratio(plane, False), case.ratio(plane, True)
        yield Record(name, min(mapped, read), "", note=f"{case}; mapped {mapped:.3g}, read {read:.3g}")


def case_records(case: Case) -> Iterator[Record]:
    """Rates of calls and whole iterations, ratios, and the controllers' CPU time."""
    yield from _rates(case, "put", False, lambda round_: round_.put)
    yield from _rates(case, "claim", False, lambda round_: round_.calls["claim"] + round_.calls["ack"])
    yield from _rates(case, "get", False, lambda round_: round_.calls["get"])
    for read in (False, True):
        name, how = ("iteration_read", "read") if read else ("iteration", "mapped")
        yield from _rates(case, name, read, lambda round_: round_.iteration)
        for plane in ("ray", "ray_from_rows", "transferqueue"):
            if (plane, read) in case.rounds:
                yield Record(f"dock.ratio_to_{plane}", case.ratio(plane, read), "", note=f"{how}; {case}")
    cpu = {
        plane: sum(round_.controller_cpu for read in (False, True) for round_ in case.rounds[plane, read])
        / sum(len(case.rounds[plane, read]) for read in (False, True))
        / case.workload.samples
        * 1e6
        for plane in ("dock", "transferqueue")
        if (plane, False) in case.rounds
    }
    yield Record(
        "dock.controller_cpu_s_per_million_rows", cpu["dock"], "s", peer=cpu.get("transferqueue"), note=str(case)
    )


def _rates(case: Case, name: str, read: bool, seconds: Callable[[Round], float]) -> Iterator[Record]:
    """Samples and megabytes a second; a claim moves no bytes and has no counterpart in bare Ray."""
    found = {
        plane: median(case.rounds[plane, read], seconds)
        for plane in ("dock", "ray", "transferqueue")
        if (plane, read) in case.rounds and not (name == "claim" and plane == "ray")
    }
    amounts = {"samples": case.workload.samples, "mb": case.workload.total_bytes / 1e6}
    if name == "claim":
        del amounts["mb"]
    for what, amount in amounts.items():
        rate = {plane: amount / time for plane, time in found.items()}
        unit = "samples/s" if what == "samples" else "MB/s"
        metric = f"dock.{name}_{what}_per_s"
        yield Record(metric, rate["dock"], unit, rate.get("ray"), rate.get("transferqueue"), note=str(case))


def main() -> None:
    """Run and publish, each part in a file of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and few repetitions; prints, writes nothing")
    parser.add_argument("--only", choices=("idle", "throughput"), help="measure one of the two parts")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else FULL
    if arguments.only != "throughput":
        records = measure_idle(settings)
        publish("transfer_dock_idle-cpu", records, cpu_name(), write=not arguments.quick)
    if arguments.only == "idle":
        return
    with_queue = importlib.util.find_spec("transfer_queue") is not None
    if not with_queue:
        print(ABSENT, file=sys.stderr)
    records = measure_throughput(settings, with_queue)
    publish("transfer_dock-cpu", records, cpu_name(), write=not arguments.quick)


if __name__ == "__main__":
    main()
