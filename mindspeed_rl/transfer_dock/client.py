"""The client's side of a dock: requests to its controller, and what this process keeps for it."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import ray

from mindspeed_rl.common.errors import DockError, DockTimeout, MindSpeedRLError
from mindspeed_rl.transfer_dock.wire import Connection, Endpoint

_ANSWER_SECONDS = 60.0  # for the controller to answer a request that does not wait for anything
_LAST_WORD_SECONDS = 5.0  # for Ray to say that a controller whose connection broke has died
_LOOK_SECONDS = 1.0  # while an answer is outstanding: how often to see whether the controller lives


class Client:
    """Connection of this process to one controller; there is one for all handles. Safe for threads.

    Ray ties an object to the process that created it, so this process keeps the payloads that it has put until the
    controller says that they are free; every answer carries what has become free since the last one.

    Args:
        endpoint: of the controller's server.
        controller: its actor.
        renew_seconds: interval of signs of life, or None for none.
    """

    def __init__(self, endpoint: Endpoint, controller: Any, renew_seconds: float | None):
        self.holder = uuid.uuid4().hex
        self._endpoint = endpoint
        self._lifetime = controller.lifetime.remote()
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._kept: dict[bytes, ray.ObjectRef] = {}
        self._renew_seconds = renew_seconds
        self._renewing = False

    def request(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Call a method of the server, which may wait for `seconds`; raises what it raises.

        Raises:
            DockError: the controller died.
            DockTimeout: it did not answer in time.
        """
        look = partial(self._look, method, time.monotonic() + seconds + _ANSWER_SECONDS, seconds)
        try:
            ok, answer = self._exchange(method, arguments, look)
        except DockTimeout:  # which is an OSError, too: the connection is as good as before
            raise
        except OSError as error:
            if (connection := vars(self._of_thread).pop("connection", None)) is not None:
                connection.close()
            if self._is_dead(_LAST_WORD_SECONDS):
                self._died(method)
            raise DockError(
                f"the TransferDock controller cannot be reached ('{method}' was called): {error}"
            ) from error
        if ok:
            return answer
        raise answer

    def _exchange(self, method: str, arguments: tuple[Any, ...], look: Callable[[], None]) -> tuple[bool, Any]:
        """Whether the request succeeded, and the answer.

        Requests are numbered. Each tells the last one whose answer arrived: what the server did for those after that
        one, which an interrupt may have ended, nobody knows of, and it takes back what it can.
        """
        mine = self._of_thread
        if not hasattr(mine, "connection"):
            mine.connection, mine.number, mine.arrived = Connection(self._endpoint, look, _LOOK_SECONDS), 0, 0
        mine.number = number = mine.number + 1
        mine.connection.send((number, mine.arrived, self.holder, method, arguments), look)
        while True:
            answered, ok, answer, freed = mine.connection.receive(look)
            self._free(address.binary for address in freed)
            if answered == number:
                mine.arrived = number
                return ok, answer

    def _look(self, method: str, deadline: float, seconds: float) -> None:
        """While an answer is outstanding."""
        if self._is_dead():
            self._died(method)
        if time.monotonic() > deadline:
            raise DockTimeout(
                f"the TransferDock controller did not answer '{method}' within {seconds + _ANSWER_SECONDS:g} s"
            )

    def _died(self, method: str) -> NoReturn:
        with self._lock:
            self._kept.clear()  # nobody can ask for it any more
        raise DockError(f"the TransferDock controller died ('{method}' was called)")

    def _is_dead(self, seconds: float = 0.0) -> bool:
        if not ray.is_initialized():
            return True
        try:
            return bool(ray.wait([self._lifetime], timeout=seconds)[0])
        except ValueError:  # Ray has been shut down and started anew since: the owner is unknown
            return True

    # --- what this process keeps

    def request_with(self, refs: Iterable[ray.ObjectRef], method: str, *arguments: Any, seconds: float = 0.0) -> None:
        """A request that registers objects: they are kept until the controller says that they are free.

        From before the request on, as one that is given up may succeed nonetheless.
        """
        kept = {ref.binary(): ref for ref in refs}
        with self._lock:
            self._kept |= kept
        try:
            self.request(method, *arguments, seconds=seconds)
        except MindSpeedRLError:
            self._free(kept)
            raise

    def _free(self, objects: Iterable[bytes]) -> None:
        with self._lock:
            for binary in objects:
                self._kept.pop(binary, None)

    def live(self) -> None:
        """Give signs of life from now on, as this process holds leases or payloads."""
        with self._lock:
            start = self._renew_seconds is not None and not self._renewing
            self._renewing |= start
        if start:
            threading.Thread(target=self._renew, name="dock-renewal", daemon=True).start()

    def _renew(self) -> None:
        assert self._renew_seconds is not None
        while ray.is_initialized():
            try:
                self.request("renew")
            except DockTimeout:
                continue  # slow, not dead: the next sign counts as much
            except DockError:
                if self._is_dead():
                    return  # nobody to give signs to; whoever uses the dock gets the same error
            time.sleep(self._renew_seconds)


_clients: dict[tuple[int, Endpoint], Client] = {}
_clients_lock = threading.Lock()


def client_of(endpoint: Endpoint, controller: Any, renew_seconds: float | None) -> Client:
    """This process's client of a controller."""
    key = os.getpid(), endpoint
    with _clients_lock:
        if key not in _clients:
            _clients[key] = Client(endpoint, controller, renew_seconds)
        return _clients[key]
