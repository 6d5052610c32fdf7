"""The client's side of a dock: requests to its controller, and what this process keeps for it."""

from __future__ import annotations

import os
import pickle
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import ray
import zmq

from mindspeed_rl.common.errors import DockError, DockTimeout, MindSpeedRLError
from mindspeed_rl.transfer_dock.spec import Claim

_ANSWER_SECONDS = 60.0  # for the controller to answer a request that does not wait for anything
_LOOK_SECONDS = 1.0  # while an answer is outstanding: how often to see whether the controller lives


class Client:
    """Connection of this process to one controller; there is one for all handles. Safe for threads.

    Ray ties an object to the process that created it, so this process keeps the payloads that it has put until the
    controller says that they are free; every answer carries what has become free since the last one.

    Args:
        endpoint: address and public key of the controller's server.
        controller: its actor.
        renew_seconds: interval of signs of life, or None for none.
    """

    def __init__(self, endpoint: tuple[str, bytes], controller: Any, renew_seconds: float | None):
        self.holder = uuid.uuid4().hex
        self._address, self._server_key = endpoint
        self._keys = zmq.curve_keypair()
        self._context = zmq.Context()
        self._lifetime = controller.lifetime.remote()
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._kept: dict[int, ray.ObjectRef] = {}
        self._free_already: set[int] = set()
        self._renew_seconds = renew_seconds
        self._renewing = False

    def request(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Call a method of the server, which may wait for `seconds`; raises what it raises.

        Raises:
            DockError: the controller died.
            DockTimeout: it did not answer in time.
        """
        if not hasattr(self._of_thread, "socket"):
            self._of_thread.socket, self._of_thread.number = self._connect(), 0
        socket, number = self._of_thread.socket, self._of_thread.number + 1
        self._of_thread.number = number
        socket.send(pickle.dumps((number, self.holder, method, arguments), protocol=5))
        deadline = time.monotonic() + seconds + _ANSWER_SECONDS
        answered, unwanted = -1, []
        while answered != number:  # an earlier request may have been given up, by an interrupt for example
            self._wait(socket, method, deadline, seconds)
            answered, ok, answer, freed = pickle.loads(socket.recv())
            self._free(freed)
            if answered != number and isinstance(answer, Claim):
                unwanted.append(answer)
        for claim in unwanted:  # rows that nobody would ever acknowledge
            with suppress(DockError):  # its lease has ended meanwhile
                self.request("release", claim.iteration, claim.lease)
        if ok:
            return answer
        if isinstance(answer, MindSpeedRLError):
            raise answer
        raise DockError(f"the TransferDock controller could not do '{method}': {answer!r}") from answer

    def _connect(self) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.curve_serverkey = self._server_key
        socket.linger = 0
        socket.connect(self._address)
        return socket

    def _wait(self, socket: zmq.Socket, method: str, deadline: float, seconds: float) -> None:
        while not socket.poll(int(1000 * _LOOK_SECONDS)):
            if self._is_dead():
                with self._lock:
                    self._kept.clear()  # nobody can ask for it any more
                raise DockError(f"the TransferDock controller died ('{method}' was called)")
            if time.monotonic() > deadline:
                raise DockTimeout(
                    f"the TransferDock controller did not answer '{method}' within {seconds + _ANSWER_SECONDS:g} s"
                )

    def _is_dead(self) -> bool:
        if not ray.is_initialized():
            return True
        try:
            return bool(ray.wait([self._lifetime], timeout=0)[0])
        except ValueError:  # Ray has been shut down and started anew since: the owner is unknown
            return True

    # --- what this process keeps

    def keep(self, payload: int, ref: ray.ObjectRef) -> None:
        """Keep an object until the controller says that the payload is free."""
        with self._lock:
            if payload in self._free_already:
                self._free_already.remove(payload)
            else:
                self._kept[payload] = ref

    def _free(self, payloads: Iterable[int]) -> None:
        with self._lock:
            for payload in payloads:
                if self._kept.pop(payload, None) is None:
                    self._free_already.add(payload)  # free before `put` has returned

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
                return  # nobody to give signs to; whoever uses the dock gets the same error
            time.sleep(self._renew_seconds)


_clients: dict[tuple[int, bytes], Client] = {}
_clients_lock = threading.Lock()


def client_of(endpoint: tuple[str, bytes], controller: Any, renew_seconds: float | None) -> Client:
    """This process's client of a controller."""
    key = os.getpid(), endpoint[1]
    with _clients_lock:
        if key not in _clients:
            _clients[key] = Client(endpoint, controller, renew_seconds)
        return _clients[key]
