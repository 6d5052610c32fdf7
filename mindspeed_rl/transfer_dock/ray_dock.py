"""The TransferDock over Ray: a handle that any process of the cluster uses.

`put` stores the payload in the object store of its own node and tells the controller where it is; `get` maps it from
there (Ray moves it between nodes when it has to). A payload belongs to the process that put it and is lost with that
process: Ray no longer lets another process own it. `get` then says so, naming the rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from mindspeed_rl.common.errors import DockError, DockTimeout, MindSpeedRLError
from mindspeed_rl.transfer_dock.controller import Controller
from mindspeed_rl.transfer_dock.payload import Payload, PayloadReader, pack
from mindspeed_rl.transfer_dock.ray_refs import Address, to_ref
from mindspeed_rl.transfer_dock.spec import DEFAULT_TIMEOUT, Claim, DockSnapshot, DockSpec, NotYet
from mindspeed_rl.transfer_dock.table import as_rows

_ANSWER_SECONDS = 60.0  # for the controller to answer a call that does not wait for anything
_SLOW_FETCH_SECONDS = 3.0
_MAX_CALLS = 100_000  # calls in flight, waiting ones included: a put must never queue behind waiting claims


class RayTransferDock:
    """`TransferDock` over a `Controller` actor; picklable, and safe for threads. Methods: see `TransferDock`."""

    def __init__(self, spec: DockSpec, controller: Any):
        self.spec = spec
        self._controller = controller
        self._reader = PayloadReader(spec, self._resolve)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.spec, self._controller)

    @classmethod
    def create(cls, spec: DockSpec, num_cpus: float = 1.0, start_timeout: float = 300.0) -> RayTransferDock:
        """Start the controller, on `num_cpus` CPUs; it lives as long as the first handle or until killed."""
        actor: Any = ray.remote(Controller)
        controller = actor.options(num_cpus=num_cpus, max_concurrency=_MAX_CALLS).remote(spec)
        dock = cls(spec, controller)
        try:
            dock._call("ready", seconds=start_timeout)
        except DockTimeout as error:
            ray.kill(controller)
            raise DockTimeout(
                f"the TransferDock controller did not start within {start_timeout} s: it needs {num_cpus} free CPUs"
            ) from error
        return dock

    def begin(
        self,
        iteration: int,
        num_prompts: int,
        n_samples: int,
        block_rows: int,
        orders: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._call("begin", iteration, num_prompts, n_samples, block_rows, orders)

    def put(
        self,
        iteration: int,
        rows: Sequence[int],
        columns: Mapping[str, Sequence[Any]],
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        numbers = as_rows(rows)
        payload, nbytes = pack(self.spec, numbers, columns)
        self._call(
            "put",
            iteration,
            numbers,
            list(payload),
            [ray.put(payload)],
            nbytes,
            timeout,
            seconds=timeout + _ANSWER_SECONDS,
        )

    def claim(
        self, consumer: str, iteration: int, count: int, share: int = 0, timeout: float = DEFAULT_TIMEOUT
    ) -> Claim | None:
        return self._call("claim", consumer, iteration, count, share, timeout, seconds=timeout + _ANSWER_SECONDS)

    def try_claim(self, consumer: str, iteration: int, count: int, share: int = 0) -> Claim | NotYet | None:
        return self._call("try_claim", consumer, iteration, count, share)

    def get(self, claim: Claim, columns: Sequence[str]) -> dict[str, Any]:
        try:
            return self._reader.get(claim, columns)
        except ObjectLostError as error:
            raise DockError(
                f"get: payloads of rows {list(claim.rows[:4])}… of iteration {claim.iteration} are gone: the "
                f"iteration has been cleared, or the process that put them died ({type(error).__name__})"
            ) from error

    def ack(self, claim: Claim) -> None:
        self._call("ack", claim.iteration, claim.lease)

    def release(self, claim: Claim) -> None:
        self._call("release", claim.iteration, claim.lease)

    def clear(self, iteration: int) -> None:
        self._reader.forget(lambda number: number == iteration)
        self._call("clear", iteration)

    def snapshot(self) -> DockSnapshot:
        state, addresses, _keep_alive = self._call("snapshot")
        payloads = ray.get([to_ref(address) for address in addresses.values()], timeout=DEFAULT_TIMEOUT)
        return DockSnapshot(state, dict(zip(addresses, payloads, strict=True)))

    def restore(self, snapshot: DockSnapshot) -> None:
        self._call("restore", snapshot.state, {key: ray.put(payload) for key, payload in snapshot.payloads.items()})

    def stats(self) -> dict[str, Any]:
        return self._call("stats")

    def _resolve(self, iteration: int, addresses: list[Address]) -> list[Payload]:
        """Fetch payloads. Ray waits for ever for an object of this process that was freed, so a slow fetch asks."""
        refs = [to_ref(address) for address in addresses]
        deadline = time.monotonic() + DEFAULT_TIMEOUT
        while time.monotonic() < deadline:
            try:
                return ray.get(refs, timeout=_SLOW_FETCH_SECONDS)
            except GetTimeoutError:
                self._call("check_alive", iteration)
        raise DockTimeout(f"{len(refs)} payloads of iteration {iteration} did not arrive within {DEFAULT_TIMEOUT} s")

    def _call(self, method: str, *args: Any, seconds: float = _ANSWER_SECONDS) -> Any:
        """Call the controller, allow `seconds` for its answer, and turn Ray's errors into the dock's."""
        try:
            return ray.get(getattr(self._controller, method).remote(*args), timeout=seconds)
        except RayTaskError as error:
            if isinstance(error.cause, MindSpeedRLError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise DockError(f"the TransferDock controller died ('{method}' was called)") from error
        except GetTimeoutError as error:
            raise DockTimeout(f"the TransferDock controller did not answer '{method}' within {seconds} s") from error
