"""The Ray actor around the dock's state machine. Rows' metadata goes through it, payloads never do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from mindspeed_rl.common.errors import DockTimeout
from mindspeed_rl.transfer_dock.ray_refs import Address, to_address
from mindspeed_rl.transfer_dock.spec import NOT_YET, Claim, DockSpec, NotYet
from mindspeed_rl.transfer_dock.table import DockTable


@dataclass
class _Waiter:
    consumer: str
    iteration: int
    count: int
    share: int
    answer: asyncio.Future[Claim | None]


class Controller:
    """Asyncio actor: one event loop, so that every call between two `await`s is atomic. No polling anywhere.

    Claims that must wait queue up per (iteration, consumer) and are tried, first come first served, when the table
    says that something changed for that pair. One timer runs, for the lease that expires first.
    """

    def __init__(self, spec: DockSpec):
        self._table = DockTable(spec)
        self._refs: dict[int, list[ray.ObjectRef]] = {}  # keep an iteration's payloads alive until it is cleared
        self._waiters: dict[tuple[int, str], list[_Waiter]] = {}
        self._blocked_puts: list[asyncio.Future[None]] = []
        self._expiry_timer: asyncio.TimerHandle | None = None

    async def ready(self) -> None:
        """Answers once the actor runs."""

    async def begin(
        self,
        iteration: int,
        num_prompts: int,
        n_samples: int,
        block_rows: int,
        orders: Mapping[str, Sequence[int]] | None,
    ) -> None:
        """See `TransferDock.begin`."""
        self._table.begin(iteration, num_prompts, n_samples, block_rows, orders)
        self._refs[iteration] = []

    async def put(
        self,
        iteration: int,
        rows: np.ndarray,
        columns: Sequence[str],
        refs: list[ray.ObjectRef],
        nbytes: int,
        timeout: float,
    ) -> None:
        """Register a payload, referenced by the one element of `refs` (Ray would resolve a bare reference)."""
        self._table.check_put(iteration, rows, columns)
        deadline = time.monotonic() + timeout
        while self._table.is_alive(iteration) and self._table.must_wait(iteration):
            freed = asyncio.get_running_loop().create_future()
            self._blocked_puts.append(freed)
            done, _ = await asyncio.wait({freed}, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                self._blocked_puts.remove(freed)
                raise DockTimeout(self._table.describe_put_wait(iteration, nbytes, timeout))
        self._table.put(iteration, rows, columns, to_address(refs[0]), nbytes)
        self._refs[iteration].append(refs[0])
        self._wake()

    async def claim(self, consumer: str, iteration: int, count: int, share: int, timeout: float) -> Claim | None:
        """See `TransferDock.claim`."""
        start = time.monotonic()
        claim = self._try(consumer, iteration, count, share)
        if claim is not NOT_YET:
            return claim
        waiter = _Waiter(consumer, iteration, count, share, asyncio.get_running_loop().create_future())
        self._waiters.setdefault((iteration, consumer), []).append(waiter)
        try:
            await asyncio.wait({waiter.answer}, timeout=timeout)
        finally:
            waited = time.monotonic() - start
            self._table.wait_seconds[consumer] += waited
            granted = waiter.answer.done()
            if not granted:  # past the deadline, or the call was cancelled: nobody would take the rows
                waiter.answer.cancel()
                self._waiters[iteration, consumer].remove(waiter)
        if granted:
            return waiter.answer.result()
        raise DockTimeout(self._table.describe_wait(consumer, iteration, count, share, waited))

    async def try_claim(self, consumer: str, iteration: int, count: int, share: int) -> Claim | NotYet | None:
        """See `TransferDock.try_claim`."""
        return self._try(consumer, iteration, count, share)

    async def ack(self, iteration: int, lease: int) -> None:
        """See `TransferDock.ack`."""
        self._table.ack(iteration, lease)
        self._wake()

    async def release(self, iteration: int, lease: int) -> None:
        """See `TransferDock.release`."""
        self._table.release(iteration, lease)
        self._wake()

    async def clear(self, iteration: int) -> None:
        """See `TransferDock.clear`."""
        self._table.clear(iteration)
        del self._refs[iteration]
        for freed in self._blocked_puts:
            freed.set_result(None)
        self._blocked_puts.clear()
        self._wake()

    async def check_alive(self, iteration: int) -> None:
        """Raise `DockError` for an iteration that is not alive."""
        if not self._table.is_alive(iteration):
            raise self._table.not_alive(iteration)

    async def snapshot(self) -> tuple[dict[str, Any], dict[int, Address], list[ray.ObjectRef]]:
        """State, payload addresses, and references that keep the payloads alive while the caller reads them."""
        return *self._table.snapshot(), [ref for refs in self._refs.values() for ref in refs]

    async def restore(self, state: Mapping[str, Any], refs: Mapping[int, ray.ObjectRef]) -> None:
        """See `TransferDock.restore`; `refs` are the payloads by id, stored anew."""
        self._table.restore(state, {key: to_address(ref) for key, ref in refs.items()})
        self._refs = {
            iteration: [refs[key] for key in saved["payloads"]] for iteration, saved in state["iterations"].items()
        }

    async def stats(self) -> dict[str, Any]:
        """See `TransferDock.stats`."""
        return self._table.stats()

    def _try(self, consumer: str, iteration: int, count: int, share: int) -> Claim | NotYet | None:
        try:
            return self._table.claim(consumer, iteration, count, share)
        finally:
            self._wake()  # the claim may have found expired leases
            self._watch_leases()

    def _wake(self) -> None:
        """Try the waiting claims whose turn may have come."""
        for key in self._table.take_woken():
            waiting = self._waiters.pop(key, [])
            still = [waiter for waiter in waiting if not self._settle(waiter)]
            if still:
                self._waiters[key] = still
        self._watch_leases()

    def _settle(self, waiter: _Waiter) -> bool:
        if waiter.answer.done():
            return True
        if not self._table.is_alive(waiter.iteration):
            waiter.answer.set_exception(self._table.not_alive(waiter.iteration))
            return True
        claim = self._table.claim(waiter.consumer, waiter.iteration, waiter.count, waiter.share)
        if claim is NOT_YET:
            return False
        waiter.answer.set_result(claim)
        return True

    def _watch_leases(self) -> None:
        """Leases all last equally long, so a running timer never has to be brought forward."""
        expiry = self._table.next_expiry()
        if self._expiry_timer is None and expiry is not None:
            delay = max(0.0, expiry - time.monotonic())
            self._expiry_timer = asyncio.get_running_loop().call_later(delay, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry_timer = None
        self._table.expire()
        self._wake()
