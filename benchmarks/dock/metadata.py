"""What rows cost the controller: memory of the state machine, and time of a claim, for 1e3 to 1e6 rows."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from dock.workload import ALIKE, GROUP, grpo_spec
from mindspeed_rl.transfer_dock.ray_refs import Address
from mindspeed_rl.transfer_dock.spec import Claim
from mindspeed_rl.transfer_dock.table import DockTable

BATCH = 64  # rows a put and a claim
STAGES = (
    ("prompt_ids",),
    ("responses", "rollout_log_probs"),
    ("rewards",),
    ("reference_log_probs",),
    ("old_log_probs",),
    ("advantages", "loss_mask"),
)


def private_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is not a mapping of a file or of shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def fill(table: DockTable, rows: int) -> None:
    """Begin iteration 0 and put addresses as the stages of a GRPO step do, `BATCH` rows at a time."""
    assert {name for stage in STAGES for name in stage} == {"prompt_ids", "responses", "rewards", *ALIKE}
    table.begin(0, rows // GROUP, GROUP, block_rows=rows)
    rng = np.random.default_rng(0)
    for columns in STAGES:
        for start in range(0, rows, BATCH):
            # sizes of a real address: id, owner, status
            address = Address(rng.bytes(28), rng.bytes(110), rng.bytes(12))
            table.put(0, np.arange(start, min(start + BATCH, rows)), columns, address, 1)
        table.take_woken()


def claim_microseconds(table: DockTable, claims: int) -> list[float]:
    """Times of claims of `BATCH` rows of all columns, with their acknowledgement."""
    times = []
    for _ in range(claims):
        start = time.perf_counter()
        claim = table.claim("update", 0, BATCH)
        assert isinstance(claim, Claim)
        table.ack(0, claim.lease)
        table.take_woken()
        times.append((time.perf_counter() - start) * 1e6)
    return times


@dataclass(frozen=True)
class Cost:
    """What a table of some number of rows takes. Other work on the machine moves the mean, not the median."""

    nbytes: int
    claim_median_us: float
    claim_mean_us: float


class Controller:
    """A fresh process, so that its growth is the table's."""

    def measure(self, rows: int, claims: int) -> Cost:
        """Memory of a table of `rows`; times of `claims` claims, of one table or as many as have so many rows."""
        warm = DockTable(grpo_spec(shares=1))
        fill(warm, 10 * BATCH)
        claim_microseconds(warm, 10)
        gc.collect()
        before = private_bytes()
        table = DockTable(grpo_spec(shares=1))
        fill(table, rows)
        grown = private_bytes() - before
        times = claim_microseconds(table, min(rows // BATCH, claims))
        while len(times) < claims:
            table = DockTable(grpo_spec(shares=1))
            fill(table, rows)
            times += claim_microseconds(table, min(rows // BATCH, claims - len(times)))
        return Cost(grown, statistics.median(times), statistics.fmean(times))


def measure(sizes: Sequence[int], claims: int) -> dict[int, Cost]:
    """Costs by number of rows."""
    costs = {}
    for rows in sizes:
        actor: Any = ray.remote(num_cpus=0)(Controller).remote()
        costs[rows] = ray.get(actor.measure.remote(rows, claims))
        ray.kill(actor)
    return costs


def plot(microseconds: Mapping[int, float], path: Path) -> None:
    """Draw claim cost over table size."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "transfer_dock"  # the same data gives the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(list(microseconds), list(microseconds.values()), marker="o")
    axes.set(xscale="log", xlabel="rows in the iteration", ylabel="µs a claim, acknowledged")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Claims of {BATCH} rows, 8 columns, by table size")
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
