"""The dock's state machine: metadata only, synchronous, without Ray, asyncio, torch or any clock of its own.

Adapters (`local`, `controller`) call it from one thread at a time and learn from `take_woken` whose waits may be
over. Every method checks everything before it changes anything.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.progress import Progress
from mindspeed_rl.transfer_dock.spec import NOT_YET, Claim, DockSpec, NotYet

_SHOWN = 4  # rows named in a message before "and N more"


def as_rows(rows: Sequence[int]) -> np.ndarray:
    """Row numbers as int64 [n]; `DockError` unless they are one or more different integers."""
    array = np.asarray(rows)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise DockError(f"rows = {rows!r:.80}: expected one or more row numbers")
    array = array.astype(np.int64)
    if array.size > 1 and len(np.unique(array)) != array.size:
        raise DockError(f"rows = {rows!r:.80}: a row occurs twice")
    return array


@dataclass
class _Lease:
    iteration: int
    consumer: str
    share: int
    units: list[int]
    expires: float


class _Iteration:
    """Rows of one iteration: where each value is, and how far each consumer got."""

    def __init__(
        self,
        spec: DockSpec,
        num_prompts: int,
        n_samples: int,
        block_rows: int,
        orders: Mapping[str, Sequence[int]],
    ):
        for name, value in (("num_prompts", num_prompts), ("n_samples", n_samples), ("block_rows", block_rows)):
            if value < 1:
                raise DockError(f"{name} = {value}: expected at least 1")
        unknown = [name for name in orders if name not in spec.consumers]
        if unknown:
            raise DockError(f"orders for unknown consumers {unknown}; there are {list(spec.consumers)}")
        self.num_prompts, self.n_samples, self.block_rows = num_prompts, n_samples, block_rows
        self.orders = {name: np.asarray(order) for name, order in orders.items()}
        self.rows = num_prompts * n_samples
        # payload id << 32 | index in the payload; 0: absent (payload ids start at 1)
        self.locations = {name: np.zeros(self.rows, np.int64) for name in spec.columns}
        self.progress = {
            name: Progress(name, consumer, self.rows, n_samples, block_rows, orders.get(name), spec.guarantee_order)
            for name, consumer in spec.consumers.items()
        }
        self.payloads: dict[int, Any] = {}
        self.bytes = 0


class DockTable:
    """Iterations, rows, leases. `clock` returns seconds that never go back."""

    def __init__(self, spec: DockSpec, clock: Callable[[], float] = time.monotonic):
        self.spec = spec
        self._clock = clock
        self._iterations: dict[int, _Iteration] = {}
        self._cleared: set[int] = set()
        self._leases: dict[int, _Lease] = {}
        self._expiries: deque[int] = deque()  # lease ids, oldest first; ended ones are skipped when they come up
        # A random start: a lease from before a restore can never be taken for one of this table.
        self._next_lease = secrets.randbits(62)
        self._next_payload = 1
        self._woken: dict[tuple[int, str], None] = {}
        self.bytes_put = 0
        self.wait_seconds = dict.fromkeys(spec.consumers, 0.0)

    # --- life of an iteration

    def begin(
        self,
        iteration: int,
        num_prompts: int,
        n_samples: int,
        block_rows: int,
        orders: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """See `TransferDock.begin`."""
        if iteration in self._iterations or iteration in self._cleared:
            raise DockError(f"iteration {iteration} was begun before")
        self._iterations[iteration] = _Iteration(self.spec, num_prompts, n_samples, block_rows, orders or {})

    def clear(self, iteration: int) -> None:
        """See `TransferDock.clear`."""
        self._iteration(iteration)
        del self._iterations[iteration]
        self._cleared.add(iteration)
        self._leases = {key: lease for key, lease in self._leases.items() if lease.iteration != iteration}
        for name in self.spec.consumers:
            self._woken[iteration, name] = None

    def is_alive(self, iteration: int) -> bool:
        """Begun and not cleared."""
        return iteration in self._iterations

    def not_alive(self, iteration: int) -> DockError:
        """The error for whatever comes too early or too late for an iteration."""
        what = "has been cleared" if iteration in self._cleared else "has not been begun"
        return DockError(f"iteration {iteration} {what}")

    @property
    def oldest(self) -> int:
        """The oldest live iteration."""
        return min(self._iterations)

    # --- rows in

    def check_put(self, iteration: int, rows: np.ndarray, columns: Iterable[str]) -> None:
        """Raise `DockError` if a put of these rows (from `as_rows`) and columns would be refused."""
        state = self._iteration(iteration)
        outside = rows[(rows < 0) | (rows >= state.rows)]
        if outside.size:
            raise DockError(f"put: row {outside[0]} is outside iteration {iteration}, which has {state.rows} rows")
        for column in columns:
            if column not in state.locations:
                raise DockError(f"put: unknown column '{column}'; there are {list(state.locations)}")
            present = rows[state.locations[column][rows] > 0]
            if present.size:
                raise DockError(f"put: row {present[0]} of iteration {iteration} has column '{column}' already")

    def must_wait(self, iteration: int) -> bool:
        """Back-pressure: a put for this iteration has to wait until memory is freed (see `DockSpec.max_bytes`)."""
        limit = self.spec.max_bytes
        return limit is not None and self.live_bytes > limit and iteration != self.oldest

    def put(self, iteration: int, rows: np.ndarray, columns: Sequence[str], payload: Any, nbytes: int) -> None:
        """Register a payload that holds `columns` of `rows`, in that order of rows; `payload` is its address."""
        self.check_put(iteration, rows, columns)
        state = self._iteration(iteration)
        payload_id, self._next_payload = self._next_payload, self._next_payload + 1
        state.payloads[payload_id] = payload
        state.bytes += nbytes
        self.bytes_put += nbytes
        locations = (payload_id << 32) + np.arange(len(rows), dtype=np.int64)
        for column in columns:
            state.locations[column][rows] = locations
        for name, progress in state.progress.items():
            values = sum(column in progress.spec.needs for column in columns)
            if values and progress.arrived(rows, values):
                self._woken[iteration, name] = None

    # --- rows out

    def claim(self, consumer: str, iteration: int, count: int, share: int = 0) -> Claim | NotYet | None:
        """See `TransferDock.try_claim`."""
        self.expire()
        state = self._iteration(iteration)
        progress = self._progress(state, consumer, count, share)
        units = progress.take(share, count)
        if not units:
            return None if progress.finished(share) else NOT_YET
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        expires = self._clock() + self.spec.lease_seconds
        self._leases[lease] = _Lease(iteration, consumer, share, units, expires)
        self._expiries.append(lease)
        rows = progress.rows_of(units)
        needs = progress.spec.needs
        locations = np.stack([state.locations[column][rows] for column in needs])
        return Claim(
            consumer=consumer,
            iteration=iteration,
            share=share,
            lease=lease,
            rows=tuple(rows.tolist()),
            columns=needs,
            locations=locations,
            payloads={key: state.payloads[key] for key in np.unique(locations >> 32).tolist()},
            oldest_iteration=self.oldest,
        )

    def ack(self, iteration: int, lease: int) -> None:
        """See `TransferDock.ack`."""
        held = self._end_lease(iteration, lease)
        self._iterations[iteration].progress[held.consumer].acknowledged(held.share, held.units)

    def release(self, iteration: int, lease: int) -> None:
        """See `TransferDock.release`."""
        self._give_back(self._end_lease(iteration, lease))

    def expire(self) -> None:
        """Take back rows whose lease has run out. All operations that look at leases do so first."""
        now = self._clock()
        while (expires := self.next_expiry()) is not None and expires <= now:
            self._give_back(self._leases.pop(self._expiries.popleft()))

    def next_expiry(self) -> float | None:
        """Clock time at which the first lease runs out."""
        while self._expiries and self._expiries[0] not in self._leases:
            self._expiries.popleft()
        return self._leases[self._expiries[0]].expires if self._expiries else None

    def take_woken(self) -> list[tuple[int, str]]:
        """(iteration, consumer) pairs whose waiting claims may succeed, end or fail since the last call."""
        woken, self._woken = list(self._woken), {}
        return woken

    # --- reports

    def describe_wait(self, consumer: str, iteration: int, count: int, share: int, seconds: float) -> str:
        """What a claim that passed its deadline waited for, naming the first rows and the columns they lack."""
        state = self._iteration(iteration)
        progress = state.progress[consumer]
        rows = progress.rows_of(progress.queue.upcoming(share, count // progress.unit_rows))
        lacking = [
            (row, [name for name in progress.spec.needs if not state.locations[name][row]]) for row in rows.tolist()
        ]
        lacking = [(row, names) for row, names in lacking if names]
        reasons = [f"row {row} lacks {', '.join(names)}" for row, names in lacking[:_SHOWN]]
        if len(lacking) > _SHOWN:
            reasons.append(f"and {len(lacking) - _SHOWN} more rows")
        out = [row for lease in self._leases.values() for row in self._rows_out(lease, consumer, iteration, share)]
        if out:
            shown = ", ".join(map(str, out[:_SHOWN])) + (", …" if len(out) > _SHOWN else "")
            reasons.append(f"{len(out)} rows are out under a lease ({shown})")
        return (
            f"consumer '{consumer}' share {share} of {progress.spec.shares} waited {seconds:.1f} s for {count} rows "
            f"of iteration {iteration}: {'; '.join(reasons)}"
        )

    def describe_put_wait(self, iteration: int, nbytes: int, seconds: float) -> str:
        """What a put that passed its deadline waited for."""
        return (
            f"put of {nbytes} bytes for iteration {iteration} waited {seconds:.1f} s: iterations "
            f"{sorted(self._iterations)} hold {self.live_bytes} bytes, the limit is {self.spec.max_bytes}; "
            f"memory is freed when iteration {self.oldest} is cleared"
        )

    def stats(self) -> dict[str, Any]:
        """See `TransferDock.stats`."""
        return {
            "rows": {iteration: state.rows for iteration, state in self._iterations.items()},
            "rows_out": sum(len(lease.units) * self._unit_rows(lease) for lease in self._leases.values()),
            "bytes": self.live_bytes,
            "bytes_put": self.bytes_put,
            "wait_seconds": dict(self.wait_seconds),
        }

    @property
    def live_bytes(self) -> int:
        """Payload bytes of all live iterations."""
        return sum(state.bytes for state in self._iterations.values())

    # --- snapshots

    def snapshot(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Plain state, and the addresses of all payloads by id."""
        iterations = {
            number: {
                "begin": (state.num_prompts, state.n_samples, state.block_rows, state.orders),
                "locations": {name: values.copy() for name, values in state.locations.items()},
                "acked_by": {name: progress.acked_by.copy() for name, progress in state.progress.items()},
                "payloads": list(state.payloads),
                "bytes": state.bytes,
            }
            for number, state in self._iterations.items()
        }
        shape = (self.spec.columns, self.spec.consumers, self.spec.guarantee_order)
        state = {
            "shape": shape,
            "iterations": iterations,
            "cleared": sorted(self._cleared),
            "next_payload": self._next_payload,
            "bytes_put": self.bytes_put,
        }
        return state, {key: value for item in self._iterations.values() for key, value in item.payloads.items()}

    def restore(self, state: Mapping[str, Any], payloads: Mapping[int, Any]) -> None:
        """Take over a snapshot's state, with the new addresses of its payloads."""
        if self._iterations:
            raise DockError(f"restore: the dock holds iterations {list(self._iterations)}; it must be empty")
        if state["shape"] != (self.spec.columns, self.spec.consumers, self.spec.guarantee_order):
            raise DockError("restore: the snapshot is of a dock with other columns, consumers or order guarantee")
        restored: dict[int, _Iteration] = {}
        for number, saved in state["iterations"].items():
            iteration = restored[number] = _Iteration(self.spec, *saved["begin"])
            for name, values in saved["locations"].items():
                iteration.locations[name][:] = values
            for name, progress in iteration.progress.items():
                needed = np.stack([iteration.locations[column] for column in progress.spec.needs])
                progress.rebuild(needed, saved["acked_by"][name])
            iteration.payloads = {key: payloads[key] for key in saved["payloads"]}
            iteration.bytes = saved["bytes"]
        self._iterations = restored
        self._cleared = set(state["cleared"])
        self._next_payload = state["next_payload"]
        self.bytes_put = state["bytes_put"]

    # --- helpers

    def _iteration(self, iteration: int) -> _Iteration:
        if iteration in self._iterations:
            return self._iterations[iteration]
        raise self.not_alive(iteration)

    def _progress(self, state: _Iteration, consumer: str, count: int, share: int) -> Progress:
        if consumer not in state.progress:
            raise DockError(f"unknown consumer '{consumer}'; there are {list(state.progress)}")
        progress = state.progress[consumer]
        if not 0 <= share < progress.spec.shares:
            raise DockError(f"consumer '{consumer}' has no share {share}: it has {progress.spec.shares}")
        if count < 1 or count % progress.unit_rows:
            expected = f"a multiple of n_samples = {progress.unit_rows}" if progress.unit_rows > 1 else "at least 1"
            raise DockError(f"consumer '{consumer}' asked for count = {count} rows: expected {expected}")
        return progress

    def _end_lease(self, iteration: int, lease: int) -> _Lease:
        self._iteration(iteration)
        self.expire()
        if lease not in self._leases:
            raise DockError(
                f"lease {lease} of iteration {iteration} is not held: it was acknowledged or released, or it expired "
                f"after {self.spec.lease_seconds} s and its rows were given back"
            )
        held = self._leases.pop(lease)
        self._woken[held.iteration, held.consumer] = None
        return held

    def _give_back(self, lease: _Lease) -> None:
        self._iterations[lease.iteration].progress[lease.consumer].queue.give_back(lease.share, lease.units)
        self._woken[lease.iteration, lease.consumer] = None

    def _unit_rows(self, lease: _Lease) -> int:
        return self._iterations[lease.iteration].progress[lease.consumer].unit_rows

    def _rows_out(self, lease: _Lease, consumer: str, iteration: int, share: int) -> list[int]:
        if (lease.iteration, lease.consumer, lease.share) != (iteration, consumer, share):
            return []
        return self._iterations[iteration].progress[consumer].rows_of(lease.units).tolist()
