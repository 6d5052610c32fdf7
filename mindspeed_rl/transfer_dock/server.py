"""The controller's side of a dock: answers requests, one after the other, and lets claims and puts wait.

Requests come over sockets (see `wire`): one takes a small part of the time of a Ray actor call, which a stage would
spend several times a micro-batch. One thread owns the table, so that every request is atomic. Nothing polls: the
thread sleeps until a request comes or the first deadline passes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DockError, DockTimeout, MindSpeedRLError
from mindspeed_rl.transfer_dock.spec import NOT_YET, Claim, DockSpec
from mindspeed_rl.transfer_dock.table import DockTable
from mindspeed_rl.transfer_dock.wire import ServerConnection, listen


@dataclass(frozen=True)
class Sender:
    """Who waits for an answer, and to which request."""

    connection: ServerConnection
    number: int
    holder: str


@dataclass(frozen=True)
class _Claim:
    """A claim that waits."""

    sender: Sender
    consumer: str
    iteration: int
    count: int
    share: int
    since: float
    deadline: float


@dataclass(frozen=True)
class _Put:
    """A put that waits for memory."""

    sender: Sender
    arguments: tuple[Any, ...]
    since: float
    deadline: float


_WAITS = object()  # returned by a handler that will answer later


class DockServer:
    """One dock. Clients reach it at `port`, with `key`; `run` serves for ever."""

    def __init__(self, spec: DockSpec):
        self.spec = spec
        self._table = DockTable(spec)
        self._claims: dict[tuple[int, str], list[_Claim]] = {}
        self._puts: list[_Put] = []
        self._received: list[tuple[Sender, int, str, tuple[Any, ...]]] = []
        self._next_work: asyncio.TimerHandle | asyncio.Handle | None = None
        self._socket = listen()
        self.port = self._socket.getsockname()[1]
        self.key = secrets.token_bytes(32)

    def run(self) -> None:
        """Serve requests; ends with the first error that is not the fault of a request."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        failed = loop.create_future()

        def fail(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if isinstance(context.get("exception"), OSError):  # accepting: asyncio goes on
                loop.default_exception_handler(context)
            elif not failed.done():
                failed.set_exception(context.get("exception") or RuntimeError(context["message"]))

        loop.set_exception_handler(fail)
        self._loop = loop
        server = await loop.create_server(
            lambda: ServerConnection(self.key, self._receive, self._lost), sock=self._socket, backlog=1024
        )
        try:
            await failed
        finally:
            server.close()

    def _work(self) -> None:
        received, self._received = self._received, []
        for sender, arrived, method, arguments in received:
            self._take_back(sender.connection, arrived)
            self._handle(sender, method, arguments)
        self._table.expire()
        self._retry_puts()
        self._wake()
        self._time_out()
        self._next_work = None
        if (seconds := self._seconds_to_deadline()) is not None:
            self._next_work = self._loop.call_later(seconds, self._work)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [claim.deadline for waiting in self._claims.values() for claim in waiting]
        deadlines += [put.deadline for put in self._puts]
        if self._claims and (expiry := self._table.next_expiry()) is not None:
            deadlines.append(expiry)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _receive(self, connection: ServerConnection, message: Any) -> None:
        """A request has come.

        It is a sign of life, and seen as such before the first of those that came at the same time is answered: if
        this process was held up for long, no lease ends whose holder's request was waiting.
        """
        number, arrived, holder, method, arguments = message
        if number <= connection.newest:
            return  # an interrupt while it was sent had it sent twice
        connection.newest = number
        self._table.renew(holder)
        if not self._received:
            if self._next_work is not None:
                self._next_work.cancel()
            self._next_work = self._loop.call_soon(self._work)  # after all that can be received now
        self._received.append((Sender(connection, number, holder), arrived, method, arguments))

    def _take_back(self, connection: ServerConnection, arrived: int) -> None:
        """A new request: earlier ones whose answers have not arrived were given up."""
        if connection.waits:
            self._lost(connection)
        for number, (iteration, lease) in connection.granted.items():
            if number > arrived:
                with suppress(DockError):  # it has ended meanwhile
                    self._table.release(iteration, lease)
        connection.granted.clear()

    def _lost(self, connection: ServerConnection) -> None:
        """Nobody waits for these answers any more."""
        connection.waits = False
        self._puts = [put for put in self._puts if put.sender.connection is not connection]
        for key, waiting in list(self._claims.items()):
            self._keep_waiting(key, [claim for claim in waiting if claim.sender.connection is not connection])

    def _keep_waiting(self, key: tuple[int, str], claims: list[_Claim]) -> None:
        if claims:
            self._claims[key] = claims
        else:
            self._claims.pop(key, None)

    def _handle(self, sender: Sender, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = getattr(self, f"do_{method}")(sender, *arguments)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._answer(sender, error, ok=False)
        else:
            if answer is _WAITS:
                sender.connection.waits = True
            else:
                self._answer(sender, answer)

    def _answer(self, sender: Sender, answer: Any, ok: bool = True) -> None:
        if not ok and not isinstance(answer, MindSpeedRLError):  # of a class that the client may not have
            answer = DockError(f"the TransferDock controller failed: {answer!r}")
        connection = sender.connection
        connection.waits = False
        if isinstance(answer, Claim):
            if connection.is_closed:  # nobody would ever acknowledge its rows
                self._table.release(answer.iteration, answer.lease)
                return
            connection.granted[sender.number] = answer.iteration, answer.lease
        if not connection.is_closed:
            connection.send((sender.number, ok, answer, self._table.take_freed(sender.holder)))

    # --- requests

    def do_begin(self, sender: Sender, *arguments: Any) -> int:
        """See `TransferDock.begin`."""
        return self._table.begin(*arguments)

    def do_extend(self, sender: Sender, iteration: int, num_prompts: int) -> None:
        """See `TransferDock.extend`."""
        self._table.extend(iteration, num_prompts)

    def do_fill(self, sender: Sender, iteration: int) -> None:
        """See `TransferDock.fill`."""
        self._table.fill(iteration)

    def do_put(
        self,
        sender: Sender,
        iteration: int,
        rows: np.ndarray,
        columns: Sequence[str],
        address: Any,
        nbytes: int,
        lengths: Mapping[str, np.ndarray],
        lease: int | None,
        timeout: float,
        rejected: np.ndarray | None,
    ) -> Any:
        """Register a payload that the sender keeps, and with a lease acknowledge its rows; returns its number."""
        if self._table.must_wait(iteration):
            self._table.check_put(iteration, rows, columns, lease, rejected)  # refused at once, not after the wait
            arguments = (iteration, rows, columns, address, nbytes, lengths, lease, timeout, rejected)
            now = time.monotonic()
            self._puts.append(_Put(sender, arguments, now, now + timeout))
            return _WAITS
        return self._table.put(iteration, rows, columns, address, nbytes, lengths, sender.holder, lease, rejected)

    def do_claim(
        self,
        sender: Sender,
        consumer: str,
        iteration: int,
        count: int,
        share: int,
        timeout: float,
    ) -> Any:
        """See `TransferDock.claim`."""
        claim = self.do_try_claim(sender, consumer, iteration, count, share)
        if claim is not NOT_YET:
            return claim
        now = time.monotonic()
        waiting = _Claim(sender, consumer, iteration, count, share, now, now + timeout)
        self._claims.setdefault((iteration, consumer), []).append(waiting)
        return _WAITS

    def do_try_claim(self, sender: Sender, consumer: str, iteration: int, count: int, share: int) -> Any:
        """See `TransferDock.try_claim`."""
        holder = sender.holder if self.spec.renew_leases else None
        return self._table.claim(consumer, iteration, count, share, holder)

    def do_ack(self, sender: Sender, iteration: int, lease: int, rows: np.ndarray | None) -> None:
        """See `TransferDock.ack`."""
        self._table.ack(iteration, lease, rows)

    def do_release(self, sender: Sender, iteration: int, lease: int) -> None:
        """See `TransferDock.release`."""
        self._table.release(iteration, lease)

    def do_lost(self, sender: Sender, payloads: Sequence[int]) -> dict[int, dict[str, list[int]]]:
        """See `DockTable.lose`."""
        return self._table.lose(payloads)

    def do_renew(self, sender: Sender) -> None:
        """A sign of life, as any request is."""

    def do_advance(self, sender: Sender, version: int) -> None:
        """See `TransferDock.advance`."""
        self._table.advance(version)

    def do_clear(self, sender: Sender, iteration: int) -> None:
        """See `TransferDock.clear`."""
        self._table.clear(iteration)

    def _retry_puts(self) -> None:
        """Memory may have been freed, or the iteration of a waiting put cleared."""
        blocked, self._puts = self._puts, []
        for put in blocked:
            try:
                answer = self.do_put(put.sender, *put.arguments)
            except Exception as error:  # noqa: BLE001 - it is the caller's
                self._answer(put.sender, error, ok=False)
            else:
                if answer is _WAITS:
                    self._puts[-1] = put  # with the deadline it had
                else:
                    self._answer(put.sender, answer)

    def do_check_alive(self, sender: Sender, iteration: int) -> None:
        """Raise `DockError` for an iteration that is not alive."""
        if not self._table.is_alive(iteration):
            raise self._table.not_alive(iteration)

    def do_snapshot(self, sender: Sender) -> tuple[dict[str, Any], dict[int, Any]]:
        """State and payload addresses."""
        return self._table.snapshot()

    def do_restore(self, sender: Sender, state: Mapping[str, Any], addresses: Mapping[int, Any]) -> None:
        """See `TransferDock.restore`; the payloads have been stored anew, by the sender."""
        self._table.restore(state, addresses, sender.holder)

    def do_stats(self, sender: Sender) -> dict[str, Any]:
        """See `TransferDock.stats`."""
        return self._table.stats()

    # --- waits

    def _wake(self) -> None:
        """Try the waiting claims whose turn may have come."""
        while woken := self._table.take_woken():  # a claim that is answered may end others
            for key in woken:
                self._keep_waiting(key, [claim for claim in self._claims.get(key, []) if not self._settle(claim)])

    def _settle(self, waiting: _Claim) -> bool:
        try:
            claim = self.do_try_claim(
                waiting.sender, waiting.consumer, waiting.iteration, waiting.count, waiting.share
            )
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._end(waiting, error, ok=False)
            return True
        if claim is not NOT_YET:
            self._end(waiting, claim)
        return claim is not NOT_YET

    def _end(self, waiting: _Claim, answer: Any, ok: bool = True) -> None:
        self._table.wait_seconds[waiting.consumer] += time.monotonic() - waiting.since
        self._answer(waiting.sender, answer, ok)

    def _time_out(self) -> None:
        now = time.monotonic()
        for key, waiting in list(self._claims.items()):
            late = [claim for claim in waiting if claim.deadline <= now]
            for claim in late:
                message = self._table.describe_wait(
                    claim.consumer, claim.iteration, claim.count, claim.share, now - claim.since
                )
                self._end(claim, DockTimeout(message), ok=False)
            if late:
                self._keep_waiting(key, [claim for claim in waiting if claim not in late])
        for put in [put for put in self._puts if put.deadline <= now]:
            self._puts.remove(put)
            message = self._table.describe_put_wait(put.arguments[0], put.arguments[4], now - put.since)
            self._answer(put.sender, DockTimeout(message), ok=False)
