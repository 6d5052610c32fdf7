"""The TransferDock inside one process, for any number of threads: same state machine, no Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DockTimeout
from mindspeed_rl.transfer_dock.arrays import as_rejected, as_rows
from mindspeed_rl.transfer_dock.checks import instance, seconds
from mindspeed_rl.transfer_dock.payload import pack
from mindspeed_rl.transfer_dock.reader import PayloadReader
from mindspeed_rl.transfer_dock.spec import (
    DEFAULT_TIMEOUT,
    NOT_YET,
    Claim,
    DockSnapshot,
    DockSpec,
    Filter,
    NotYet,
    Selection,
)
from mindspeed_rl.transfer_dock.table import DockTable


class LocalTransferDock:
    """`TransferDock` for one process; addresses are the payloads themselves. Methods: see `TransferDock`."""

    def __init__(self, spec: DockSpec):
        self.spec = spec
        self._table = DockTable(spec)
        self._changed = threading.Condition()
        self._reader = PayloadReader(spec, resolve=lambda claim, ids: [claim.payloads[key] for key in ids])

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
        with self._changed:
            return self._table.begin(iteration, num_prompts, n_samples, block_rows, orders, selection, carry_from)

    def extend(self, iteration: int, num_prompts: int) -> None:
        with self._changed:
            self._table.extend(iteration, num_prompts)
            self._notify()

    def fill(self, iteration: int) -> None:
        with self._changed:
            self._table.fill(iteration)
            self._notify()

    def put(
        self,
        iteration: int,
        rows: Sequence[int],
        columns: Mapping[str, Sequence[Any]],
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._put(iteration, as_rows(rows), columns, None, timeout)

    def _put(
        self,
        iteration: int,
        rows: np.ndarray,
        columns: Mapping[str, Sequence[Any]],
        lease: int | None,
        timeout: float,
        rejected: np.ndarray | None = None,
    ) -> None:
        timeout = seconds("timeout", timeout)
        payload = pack(self.spec, rows, columns)
        lengths = payload.lengths_for(self.spec)
        with self._changed:
            self._alive()
            self._table.check_put(iteration, rows, payload.columns, lease, rejected)
            if not self._changed.wait_for(lambda: self._must_not_wait(iteration), timeout):
                raise DockTimeout(self._table.describe_put_wait(iteration, payload.nbytes, timeout))
            names = list(payload.columns)
            self._table.put(iteration, rows, names, payload, payload.nbytes, lengths, None, lease, rejected)
            self._notify()

    def claim(
        self,
        consumer: str,
        iteration: int,
        count: int,
        share: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Claim | None:
        timeout, start = seconds("timeout", timeout), time.monotonic()
        with self._changed:
            try:
                while (claim := self._claim(consumer, iteration, count, share)) is NOT_YET:
                    waited = time.monotonic() - start
                    if waited >= timeout:
                        raise DockTimeout(self._table.describe_wait(consumer, iteration, count, share, waited))
                    expiry = self._table.next_expiry()
                    until_expiry = timeout if expiry is None else max(0.0, expiry - time.monotonic())
                    self._changed.wait(min(timeout - waited, until_expiry))
                self._notify()  # others wait for this lease's end from now on
            finally:
                if consumer in self._table.wait_seconds:
                    self._table.wait_seconds[consumer] += time.monotonic() - start
            return claim

    def try_claim(self, consumer: str, iteration: int, count: int, share: int = 0) -> Claim | NotYet | None:
        with self._changed:
            claim = self._claim(consumer, iteration, count, share)
            self._notify()
            return claim

    def _claim(self, consumer: str, iteration: int, count: int, share: int) -> Claim | NotYet | None:
        self._alive()
        return self._table.claim(consumer, iteration, count, share, self._holder)

    def get(self, claim: Claim, columns: Sequence[str]) -> dict[str, Any]:
        instance("claim", claim, Claim)
        with self._changed:
            if not self._table.is_alive(claim.iteration):
                raise self._table.not_alive(claim.iteration)
        return self._reader.get(claim, columns)

    def ack(
        self,
        claim: Claim,
        columns: Mapping[str, Sequence[Any]] | None = None,
        rows: Sequence[int] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        rejected: Sequence[int] | None = None,
    ) -> None:
        instance("claim", claim, Claim)
        judged = as_rejected(rejected, columns)
        if columns:
            numbers = as_rows(claim.rows if rows is None else rows)
            self._put(claim.iteration, numbers, columns, claim.lease, timeout, judged)
            return
        with self._changed:
            self._alive()
            self._table.ack(claim.iteration, claim.lease, None if rows is None else as_rows(rows))
            self._notify()

    def release(self, claim: Claim) -> None:
        instance("claim", claim, Claim)
        with self._changed:
            self._alive()
            self._table.release(claim.iteration, claim.lease)
            self._notify()

    def advance(self, version: int) -> None:
        with self._changed:
            self._table.advance(version)
            self._notify()

    def clear(self, iteration: int) -> None:
        with self._changed:
            self._table.clear(iteration)
            self._reader.forget(lambda number: number == iteration)
            self._notify()

    def snapshot(self) -> DockSnapshot:
        with self._changed:
            return DockSnapshot(*self._table.snapshot())

    def restore(self, snapshot: DockSnapshot) -> None:
        instance("snapshot", snapshot, DockSnapshot)
        with self._changed:
            self._table.restore(snapshot.state, snapshot.payloads)

    def stats(self) -> dict[str, Any]:
        with self._changed:
            return self._table.stats()

    @property
    def _holder(self) -> str | None:
        return "this process" if self.spec.renew_leases else None

    def _alive(self) -> None:
        """With leases that live as long as their process, they live as long as this dock."""
        if self._holder is not None:
            self._table.renew(self._holder)

    def _notify(self) -> None:
        self._table.take_woken()  # all waiting threads look for themselves
        self._changed.notify_all()

    def _must_not_wait(self, iteration: int) -> bool:
        # Cleared while it waited: `put` says so.
        return not self._table.is_alive(iteration) or not self._table.must_wait(iteration)
