"""The dock's state machine: metadata only, synchronous, without Ray, asyncio, torch or any clock of its own.

Adapters (`local`, `server`) call it from one thread at a time and learn from `take_woken` whose waits may be
over. Every method checks everything before it changes anything.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.checks import integer
from mindspeed_rl.transfer_dock.iteration import Begin, Iteration, Lease
from mindspeed_rl.transfer_dock.progress import Progress
from mindspeed_rl.transfer_dock.queues import NO_UNITS
from mindspeed_rl.transfer_dock.spec import ABSENT, NOT_YET, Claim, DockSpec, Filter, NotYet, Selection

_SHOWN = 4  # rows named in a message before "and N more"


@dataclass(frozen=True)
class _Payload:
    """Where a payload is, and whose it is: that process keeps it until it hears that it is free."""

    address: Any
    nbytes: int
    holder: str | None


class DockTable:
    """Iterations, rows, leases, payloads. `clock` returns seconds that never go back."""

    def __init__(self, spec: DockSpec, clock: Callable[[], float] = time.monotonic):
        self.spec = spec
        self._clock = clock
        self._iterations: dict[int, Iteration] = {}
        self._cleared: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self._expiries: list[tuple[float, int]] = []  # heap of (time, lease); outdated entries are corrected on top
        self._seen: dict[str, float] = {}  # when each process that holds leases was heard of last
        # A random start: a lease from before a restore can never be taken for one of this table.
        self._next_lease = secrets.randbits(62)
        self._payloads: dict[int, _Payload] = {}
        self._next_payload = 1
        self._freed: dict[str, list[Any]] = {}
        self._woken: dict[tuple[int, str], None] = {}
        self.version = 0  # of the policy
        self.live_bytes = 0  # of all payloads
        self.bytes_put = 0
        self.rows_redone = 0
        self.wait_seconds = dict.fromkeys(spec.consumers, 0.0)

    # --- life of an iteration

    def begin(
        self,
        iteration: int,
        num_prompts: int,
        n_samples: int,
        block_rows: int,
        orders: Mapping[str, Sequence[int]] | None = None,
        selection: Selection | Filter | None = None,
        carry_from: int | None = None,
    ) -> int:
        """See `TransferDock.begin`."""
        iteration = integer("iteration", iteration)
        if iteration in self._iterations or iteration in self._cleared:
            raise DockError(f"iteration {iteration} was begun before")
        begin = Begin.checked(num_prompts, n_samples, block_rows, orders, selection)
        former = None if carry_from is None else self._iteration(carry_from)
        if former is None:
            self._iterations[iteration] = Iteration(self.spec, begin)
            return 0
        if former.selection is None or type(selection) is not type(former.begin.selection):
            raise DockError("groups are carried over between iterations with a selection only, of the same kind")
        left = former.selection.left()
        if isinstance(selection, Filter):
            begin = replace(begin, num_prompts=begin.num_prompts + len(left))
        ages = np.zeros(begin.num_prompts, np.int32)
        left = left[: begin.num_prompts]
        ages[: len(left)] = former.selection.ages[left] + 1
        new = Iteration(self.spec, begin, ages)
        carried = new.carry_from(former)
        former.carried_to = iteration
        self._iterations[iteration] = new
        return carried

    def extend(self, iteration: int, num_prompts: int) -> None:
        """See `TransferDock.extend`."""
        self._iteration(iteration).extend(integer("num_prompts", num_prompts, least=1))

    def fill(self, iteration: int) -> None:
        """See `TransferDock.fill`."""
        self._iteration(iteration).fill()
        self._wake_all(iteration)

    def _wake_all(self, iteration: int) -> None:
        for name in self.spec.consumers:
            self._woken[iteration, name] = None

    def clear(self, iteration: int) -> None:
        """See `TransferDock.clear`."""
        state = self._iteration(iteration)
        del self._iterations[iteration]
        self._cleared.add(iteration)
        self._forget_silent_holders()
        self._leases = {key: lease for key, lease in self._leases.items() if lease.iteration != iteration}
        for payload in state.payloads:
            if not any(payload in other.payloads for other in self._iterations.values()):
                self._free(payload)
        self._wake_all(iteration)

    def _free(self, payload: int) -> None:
        freed = self._payloads.pop(payload)
        self.live_bytes -= freed.nbytes
        if freed.holder is not None:
            self._freed.setdefault(freed.holder, []).append(freed.address)

    def take_freed(self, holder: str) -> list[Any]:
        """Addresses of payloads of this process that nobody needs any more, since the last call."""
        return self._freed.pop(holder, [])

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

    def check_put(
        self,
        iteration: int,
        rows: np.ndarray,
        columns: Collection[str],
        lease: int | None = None,
        rejected: np.ndarray | None = None,
    ) -> tuple[Lease, np.ndarray] | None:
        """Raise `DockError` if a put of these rows (from `as_rows`) and columns would be refused.

        Returns the lease, and the units of it that the rows are.
        """
        if lease is None:
            self._iteration(iteration).check_put(iteration, rows, columns)
            return None
        # first: who comes after the lease's end may find that somebody else has put the values
        held, units = self._units_held(iteration, lease, rows)
        self._iterations[iteration].check_put(iteration, rows, columns)
        self._iterations[iteration].check_results(iteration, held.consumer, rows, columns)
        if rejected is not None:
            self._iterations[iteration].check_rejected(held.consumer, rows, rejected)
        return held, units

    def must_wait(self, iteration: int) -> bool:
        """Back-pressure: a put for this iteration has to wait until memory is freed (see `DockSpec.max_bytes`)."""
        limit = self.spec.max_bytes
        return limit is not None and self.live_bytes > limit and iteration != self.oldest

    def put(
        self,
        iteration: int,
        rows: np.ndarray,
        columns: Sequence[str],
        payload: Any,
        nbytes: int,
        lengths: Mapping[str, np.ndarray] | None = None,
        holder: str | None = None,
        lease: int | None = None,
        rejected: np.ndarray | None = None,
    ) -> int:
        """Register a payload that holds `columns` of `rows`, in that order of rows; `payload` is its address.

        lengths: of the rows, for columns that a consumer is balanced by.
        holder: process that keeps the payload.
        lease: that is acknowledged for these rows by this put. Returns the payload's number.
        rejected: with a lease, those of the rows whose groups are not to be selected; None: this is no judgement.
        """
        done = self.check_put(iteration, rows, columns, lease, rejected)
        if rejected is not None:
            self._iteration(iteration).judge(rows, rejected)
        number, self._next_payload = self._next_payload, self._next_payload + 1
        self._payloads[number] = _Payload(payload, nbytes, holder)
        self.live_bytes += nbytes
        self.bytes_put += nbytes
        for name in self._iteration(iteration).place(rows, columns, number, lengths or {}):
            self._woken[iteration, name] = None
        if lease is not None and done is not None:
            self._acknowledge(lease, *done)
        return number

    # --- rows out

    def claim(
        self,
        consumer: str,
        iteration: int,
        count: int,
        share: int = 0,
        holder: str | None = None,
    ) -> Claim | NotYet | None:
        """See `TransferDock.try_claim`. `holder`: process that claims, and that will call `renew`."""
        self.expire()
        state = self._iteration(iteration)
        progress = self._progress(state, consumer, count, share)
        units = NO_UNITS if self._too_early(consumer, iteration) else progress.take(share, count)
        if not len(units):
            if progress.finished(share):
                return None
            state.check_not_lost(iteration, consumer)
            return NOT_YET
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        now = self._clock()
        self._leases[lease] = Lease(iteration, consumer, share, units, holder, now)
        heapq.heappush(self._expiries, (now + self.spec.lease_seconds, lease))
        if state.close_if_enough():
            self._woken[iteration, consumer] = None
        rows = progress.rows_of(units)
        locations = state.locations_of(rows, progress.spec.reads)
        last = state.selection.is_last(rows // state.begin.n_samples).tolist() if state.selection else ()
        return Claim(
            consumer=consumer,
            iteration=iteration,
            share=share,
            lease=lease,
            rows=tuple(rows.tolist()),
            locations=locations,
            payloads={key: self._payloads[key].address for key in _payloads_in(locations)},
            oldest_iteration=self.oldest,
            last=tuple(last),
        )

    def advance(self, version: int) -> None:
        """See `TransferDock.advance`."""
        version = integer("version", version)
        if version < self.version:
            raise DockError(f"policy version {version}: it is {self.version} already")
        self.version = version
        for iteration in self._iterations:
            for name, consumer in self.spec.consumers.items():
                if consumer.max_staleness is not None:
                    self._woken[iteration, name] = None

    def _too_early(self, consumer: str, iteration: int) -> bool:
        limit = self.spec.consumers[consumer].max_staleness
        return limit is not None and iteration - self.version > limit

    def ack(self, iteration: int, lease: int, rows: np.ndarray | None = None) -> None:
        """See `TransferDock.ack`; with results it is `put` that acknowledges."""
        held, units = self._units_held(iteration, lease, rows)
        state = self._iterations[iteration]
        state.check_results(iteration, held.consumer, state.progress[held.consumer].rows_of(units))
        self._acknowledge(lease, held, units)

    def _acknowledge(self, lease: int, held: Lease, units: np.ndarray) -> None:
        if len(units) == len(held.units):
            del self._leases[lease]
        else:
            done = set(units.tolist())
            held.units = np.array([unit for unit in held.units.tolist() if unit not in done], np.int64)
        self._iterations[held.iteration].progress[held.consumer].acknowledged(held.share, units)
        self._woken[held.iteration, held.consumer] = None

    def _units_held(self, iteration: int, lease: int, rows: np.ndarray | None) -> tuple[Lease, np.ndarray]:
        """The lease and the units of it that these rows (None: all) are; `DockError` unless it is held."""
        held = self._held(iteration, lease)
        if rows is None:
            return held, held.units
        progress = self._iterations[iteration].progress[held.consumer]
        ours = progress.rows_of(held.units)
        if np.array_equal(rows, ours):
            return held, held.units
        foreign = np.setdiff1d(rows, ours)
        if foreign.size:
            raise DockError(f"ack: row {foreign[0]} of iteration {iteration} is not held under lease {lease}")
        units = np.unique(progress.units_of(rows))
        if len(units) * progress.unit_rows != len(rows):
            raise DockError(f"ack: consumer '{held.consumer}' takes whole groups of {progress.unit_rows} rows")
        return held, units

    def release(self, iteration: int, lease: int) -> None:
        """See `TransferDock.release`."""
        self._give_back(self._held(iteration, lease))
        del self._leases[lease]

    def lose(self, payloads: Sequence[int]) -> dict[int, dict[str, list[int]]]:
        """Payloads are gone with the process that held them.

        Returns what is done again, or begun anew: {iteration: {consumer: rows}}. See `Iteration.lose`.
        """
        known = [number for number in payloads if number in self._payloads]
        redone: dict[int, dict[str, list[int]]] = {}
        for number, state in self._iterations.items():
            here = state.payloads & set(known)
            if here:
                leases = {key: lease for key, lease in self._leases.items() if lease.iteration == number}
                redone[number], ended = state.lose(here, leases)
                for lease in ended:
                    del self._leases[lease]
                self.rows_redone += sum(len(rows) for rows in redone[number].values())
                self._wake_all(number)
        for payload in known:
            self.live_bytes -= self._payloads.pop(payload).nbytes
        return redone

    def renew(self, holder: str) -> None:
        """A process that holds leases lives."""
        self._seen[holder] = self._clock()

    def _forget_silent_holders(self) -> None:
        """Nobody will ask for what was freed of processes that are gone."""
        now, patience = self._clock(), 10 * self.spec.lease_seconds
        for holder in [holder for holder, seen in self._seen.items() if now - seen > patience]:
            del self._seen[holder]
            self._freed.pop(holder, None)

    def expire(self) -> None:
        """Take back rows whose lease has run out. All operations that look at leases do so first."""
        now = self._clock()
        while (expires := self.next_expiry()) is not None and expires <= now:
            lease = self._leases.pop(heapq.heappop(self._expiries)[1])
            self._give_back(lease)

    def next_expiry(self) -> float | None:
        """Clock time at which the first lease runs out, as far as is known now."""
        while self._expiries:
            expires, number = self._expiries[0]
            lease = self._leases.get(number)
            if lease is None:
                heapq.heappop(self._expiries)
                continue
            renewed = max(lease.since, self._seen.get(lease.holder or "", 0.0)) + self.spec.lease_seconds
            if renewed <= expires:
                return expires
            heapq.heapreplace(self._expiries, (renewed, number))
        return None

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
        reasons = [f"policy version is {self.version}"] if self._too_early(consumer, iteration) else []
        if progress.unbound:
            reasons.append(f"{progress.unbound} rows are not selected yet: {state.describe_selection()}")
        reasons += [f"row {row} lacks {', '.join(names)}" for row, names in lacking[:_SHOWN]]
        if len(lacking) > _SHOWN:
            reasons.append(f"and {len(lacking) - _SHOWN} more rows")
        if not lacking and not reasons and progress.queue.remaining(share):
            reasons.append(f"{progress.queue.remaining(share)} rows of the share are left")
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
            "groups": {
                iteration: state.selection.counts for iteration, state in self._iterations.items() if state.selection
            },
            "rows_out": sum(len(lease.units) * self._unit_rows(lease) for lease in self._leases.values()),
            "rows_redone": self.rows_redone,
            "bytes": self.live_bytes,
            "bytes_put": self.bytes_put,
            "wait_seconds": dict(self.wait_seconds),
        }

    # --- snapshots

    def snapshot(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Plain state, and the addresses of all payloads by id."""
        state = {
            "shape": self._shape,
            "iterations": {number: iteration.state() for number, iteration in self._iterations.items()},
            "cleared": sorted(self._cleared),
            "version": self.version,
            "next_payload": self._next_payload,
            "nbytes": {number: payload.nbytes for number, payload in self._payloads.items()},
            "bytes_put": self.bytes_put,
        }
        return state, {number: payload.address for number, payload in self._payloads.items()}

    @property
    def _shape(self) -> tuple[Any, ...]:
        """What must be the same to go on from a snapshot: all but the shares."""
        consumers = {name: replace(consumer, shares=1, balance=()) for name, consumer in self.spec.consumers.items()}
        return self.spec.columns, consumers, self.spec.guarantee_order

    def restore(self, state: Mapping[str, Any], payloads: Mapping[int, Any], holder: str | None = None) -> None:
        """Take over a snapshot's state, with the new addresses of its payloads, all of which `holder` keeps."""
        if self._iterations:
            raise DockError(f"restore: the dock holds iterations {list(self._iterations)}; it must be empty")
        if state["shape"] != self._shape:
            raise DockError("restore: the snapshot is of a dock with other columns, consumers or order guarantee")
        if missing := state["nbytes"].keys() - payloads.keys():
            raise DockError(f"restore: the snapshot lacks payloads {sorted(missing)[:_SHOWN]}")
        self._iterations = {
            number: Iteration.restored(self.spec, saved) for number, saved in state["iterations"].items()
        }
        self._payloads = {key: _Payload(payloads[key], nbytes, holder) for key, nbytes in state["nbytes"].items()}
        self.live_bytes = sum(payload.nbytes for payload in self._payloads.values())
        self._cleared = set(state["cleared"])
        self.version = state["version"]
        self._next_payload = state["next_payload"]
        self.bytes_put = state["bytes_put"]

    # --- helpers

    def _iteration(self, iteration: int) -> Iteration:
        integer("iteration", iteration)
        if iteration in self._iterations:
            return self._iterations[iteration]
        raise self.not_alive(iteration)

    def _progress(self, state: Iteration, consumer: str, count: int, share: int) -> Progress:
        if consumer not in state.progress:
            raise DockError(f"unknown consumer '{consumer}'; there are {list(state.progress)}")
        progress = state.progress[consumer]
        if not 0 <= integer("share", share) < progress.spec.shares:
            raise DockError(f"consumer '{consumer}' has no share {share}: it has {progress.spec.shares}")
        if integer("count", count) < 1 or count % progress.unit_rows:
            expected = f"a multiple of n_samples = {progress.unit_rows}" if progress.unit_rows > 1 else "at least 1"
            raise DockError(f"consumer '{consumer}' asked for count = {count} rows: expected {expected}")
        return progress

    def _held(self, iteration: int, lease: int) -> Lease:
        self._iteration(iteration)
        self.expire()
        if lease not in self._leases:
            raise DockError(
                f"lease {lease} of iteration {iteration} is not held: it was acknowledged or released, or its rows "
                f"were given back: after {self.spec.lease_seconds} s without a sign of life, or as values were lost"
            )
        return self._leases[lease]

    def _give_back(self, lease: Lease) -> None:
        state = self._iterations[lease.iteration]
        state.progress[lease.consumer].queue.give_back(lease.share, lease.units)
        state.close_if_enough()  # what came back may have to be ended by somebody else
        self._woken[lease.iteration, lease.consumer] = None

    def _unit_rows(self, lease: Lease) -> int:
        return self._iterations[lease.iteration].progress[lease.consumer].unit_rows

    def _rows_out(self, lease: Lease, consumer: str, iteration: int, share: int) -> list[int]:
        if (lease.iteration, lease.consumer, lease.share) != (iteration, consumer, share):
            return []
        return self._iterations[iteration].progress[consumer].rows_of(lease.units).tolist()


def _payloads_in(locations: Mapping[str, np.ndarray]) -> set[int]:
    """Payloads in which a claim's values are."""
    distinct = {id(array): array for array in locations.values()}.values()
    return {key for array in distinct for key in np.unique(array >> 32).tolist()} - {ABSENT}
