"""The TransferDock over Ray: a handle that any process of the cluster uses.

`put` stores the payload in the object store of its own node and tells the controller where it is; `get` maps it from
there (Ray moves it between nodes when it has to). A payload belongs to the process that put it and is lost with that
process: Ray does not let another process own it. `get` then reports it, and the dock has the rows made again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from mindspeed_rl.common.errors import DockError, DockTimeout, RowsLost
from mindspeed_rl.transfer_dock.arrays import as_rejected, as_rows
from mindspeed_rl.transfer_dock.checks import instance, seconds
from mindspeed_rl.transfer_dock.client import Client, client_of
from mindspeed_rl.transfer_dock.controller import Controller
from mindspeed_rl.transfer_dock.payload import Payload, Scratch, pack
from mindspeed_rl.transfer_dock.ray_refs import to_address, to_ref
from mindspeed_rl.transfer_dock.reader import PayloadReader
from mindspeed_rl.transfer_dock.spec import DEFAULT_TIMEOUT, Claim, DockSnapshot, DockSpec, Filter, NotYet, Selection
from mindspeed_rl.transfer_dock.wire import Endpoint

_SLOW_FETCH_SECONDS = 3.0
_MANY = 100_000  # calls in flight at the controller's actor: one for each process that uses the dock


class RayTransferDock:
    """`TransferDock` over a `Controller` actor; picklable, and safe for threads. Methods: see `TransferDock`.

    Args:
        spec: what it holds.
        controller: the actor.
        endpoint: of its server.
    """

    def __init__(self, spec: DockSpec, controller: Any, endpoint: Endpoint):
        self.spec = spec
        self._controller, self._endpoint = controller, endpoint
        self._reader = PayloadReader(spec, self._resolve)
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.spec, self._controller, self._endpoint)

    @classmethod
    def create(
        cls, spec: DockSpec, num_cpus: float = 1.0, start_timeout: float = 300.0, strategy: Any = None
    ) -> RayTransferDock:
        """Start the controller; it lives as long as the first handle or until killed.

        Args:
            spec: what the dock holds.
            num_cpus: CPUs that Ray reserves for it.
            start_timeout: seconds until it must be there.
            strategy: Ray's scheduling strategy, which chooses the node.

        Raises:
            DockTimeout: it did not start in time.
        """
        actor: Any = ray.remote(Controller)
        controller = actor.options(num_cpus=num_cpus, max_concurrency=_MANY, scheduling_strategy=strategy).remote(
            spec
        )
        try:
            endpoint = ray.get(controller.endpoint.remote(), timeout=start_timeout)
        except GetTimeoutError as error:
            ray.kill(controller)
            raise DockTimeout(
                f"the TransferDock controller did not start within {start_timeout} s: it needs {num_cpus} free CPUs"
            ) from error
        return cls(spec, controller, endpoint)

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
        arguments = (iteration, num_prompts, n_samples, block_rows, orders, selection, carry_from)
        return self._client.request("begin", *arguments)

    def extend(self, iteration: int, num_prompts: int) -> None:
        self._client.request("extend", iteration, num_prompts)

    def fill(self, iteration: int) -> None:
        self._client.request("fill", iteration)

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
        payload = pack(self.spec, rows, columns, self._scratch)
        ref = ray.put(payload)
        lengths = payload.lengths_for(self.spec)
        stored = (list(payload.columns), to_address(ref), payload.nbytes, lengths)
        self._client.request_with([ref], "put", iteration, rows, *stored, lease, timeout, rejected, seconds=timeout)
        self._client.live()

    def claim(
        self,
        consumer: str,
        iteration: int,
        count: int,
        share: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Claim | None:
        timeout = seconds("timeout", timeout)
        self._client.live()
        arguments = (consumer, iteration, count, share, timeout)
        return self._client.request("claim", *arguments, seconds=timeout)

    def try_claim(self, consumer: str, iteration: int, count: int, share: int = 0) -> Claim | NotYet | None:
        self._client.live()
        return self._client.request("try_claim", consumer, iteration, count, share)

    def get(self, claim: Claim, columns: Sequence[str]) -> dict[str, Any]:
        instance("claim", claim, Claim)
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
        else:
            self._client.request("ack", claim.iteration, claim.lease, None if rows is None else as_rows(rows))

    def release(self, claim: Claim) -> None:
        instance("claim", claim, Claim)
        self._client.request("release", claim.iteration, claim.lease)

    def advance(self, version: int) -> None:
        self._client.request("advance", version)

    def clear(self, iteration: int) -> None:
        self._reader.forget(lambda number: number == iteration)
        self._client.request("clear", iteration)

    def snapshot(self) -> DockSnapshot:
        while True:
            state, addresses = self._client.request("snapshot")
            refs = {key: to_ref(address) for key, address in addresses.items()}
            try:
                payloads = ray.get(list(refs.values()), timeout=DEFAULT_TIMEOUT)
            except ObjectLostError as error:
                lost = [key for key, ref in refs.items() if _is_lost(ref)]
                if not lost:
                    raise DockError(f"snapshot: payloads cannot be read ({error})") from error
                self._client.request("lost", lost)
            else:
                return DockSnapshot(state, dict(zip(refs, payloads, strict=True)))

    def restore(self, snapshot: DockSnapshot) -> None:
        instance("snapshot", snapshot, DockSnapshot)
        refs = {key: ray.put(payload) for key, payload in snapshot.payloads.items()}
        addresses = {key: to_address(ref) for key, ref in refs.items()}
        self._client.request_with(refs.values(), "restore", snapshot.state, addresses)

    def stats(self) -> dict[str, Any]:
        return self._client.request("stats")

    @property
    def _client(self) -> Client:
        renew_seconds = self.spec.lease_seconds / 3 if self.spec.renew_leases else None
        return client_of(self._endpoint, self._controller, renew_seconds)

    @property
    def _scratch(self) -> Scratch:
        if not hasattr(self._of_thread, "scratch"):
            self._of_thread.scratch = Scratch()
        return self._of_thread.scratch

    def _resolve(self, claim: Claim, ids: list[int]) -> list[Payload]:
        """Fetch payloads. Ray waits for ever for an object of this process that was freed, so a slow fetch asks."""
        refs = [to_ref(claim.payloads[key]) for key in ids]
        deadline = time.monotonic() + DEFAULT_TIMEOUT
        while time.monotonic() < deadline:
            try:
                return ray.get(refs, timeout=_SLOW_FETCH_SECONDS)
            except GetTimeoutError:
                self._client.request("check_alive", claim.iteration)
            except ObjectLostError as error:
                lost = [key for key, ref in zip(ids, refs, strict=True) if _is_lost(ref)]
                redone = self._client.request("lost", lost)
                self._client.request("check_alive", claim.iteration)
                raise RowsLost(_describe_loss(claim, redone)) from error
        raise DockTimeout(
            f"{len(refs)} payloads of iteration {claim.iteration} did not arrive within {DEFAULT_TIMEOUT} s"
        )


def _is_lost(ref: ray.ObjectRef) -> bool:
    try:
        ray.get(ref, timeout=_SLOW_FETCH_SECONDS)
    except ObjectLostError:
        return True
    except GetTimeoutError:
        return False
    return False


def _describe_loss(claim: Claim, redone: Mapping[int, Mapping[str, Sequence[int]]]) -> str:
    again = [
        f"'{consumer}' of iteration {iteration}: rows {', '.join(map(str, rows[:4]))}{', …' if len(rows) > 4 else ''}"
        for iteration, consumers in redone.items()
        for consumer, rows in consumers.items()
    ]
    return (
        f"values of rows of iteration {claim.iteration} that '{claim.consumer}' claimed are gone with the process "
        f"that put them; made again: {'; '.join(again) or 'nothing'}"
    )
