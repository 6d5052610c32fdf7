"""Messages between the clients of a dock and its server: pickles with their length before them, over TCP.

Plain sockets, as a message queue's threads would double the time of a request. Whoever connects must prove that it
knows the server's key, which Ray brings to those who may use the dock, before anything it sends is looked at. Nothing
is encrypted, like all that Ray and the collectives send between the nodes of a cluster.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")
_NONCE_BYTES = 32
_CONNECT_SECONDS = 60.0
_CHUNK = 1 << 18  # bytes that are received at once


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and what one must know to speak to it."""

    host: str
    port: int
    key: bytes


def _proof(key: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, nonce, "sha256")


def _frame(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(data)) + data


class _Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """What has arrived."""
        self._data += data

    def take(self, size: int) -> bytes | None:
        """The next `size` bytes, once they are there."""
        if len(self._data) < size:
            return None
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken

    def message(self) -> bytes | None:
        """The next message, once all of it is there."""
        if len(self._data) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
        frame = self.take(end)
        return None if frame is None else frame[_LENGTH.size :]


class Connection:
    """A client's connection; used by one thread.

    Args:
        endpoint: of the server.
        look: called whenever nothing has moved for `look_seconds`; what it raises ends the call.

    Raises:
        OSError: the server cannot be reached; by every method: the connection is lost.
    """

    def __init__(self, endpoint: Endpoint, look: Callable[[], None], look_seconds: float):
        self._frames, self._unsent = _Frames(), memoryview(b"")
        self._socket = socket.create_connection((endpoint.host, endpoint.port), timeout=_CONNECT_SECONDS)
        self._socket.settimeout(look_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (nonce := self._frames.take(_NONCE_BYTES)) is None:
            self._receive(look)
        self._unsent = memoryview(_proof(endpoint.key, nonce))

    def send(self, message: Any, look: Callable[[], None]) -> None:
        """Send a message. What an interrupted call has not sent goes before the next one."""
        self._unsent = memoryview(bytes(self._unsent) + _frame(message))
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except TimeoutError:
                look()

    def receive(self, look: Callable[[], None]) -> Any:
        """The next message; the parts of it that came during an interrupted call are kept."""
        while (message := self._frames.message()) is None:
            self._receive(look)
        return pickle.loads(message)

    def _receive(self, look: Callable[[], None]) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except TimeoutError:
            look()
            return
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self._frames.feed(data)

    def close(self) -> None:
        """End it."""
        self._socket.close()


class ServerConnection(asyncio.Protocol):
    """The server's end of a connection.

    Args:
        key: of the server.
        receive: called with this and every message.
        lost: called with this when the connection has ended.
    """

    def __init__(
        self,
        key: bytes,
        receive: Callable[[ServerConnection, Any], None],
        lost: Callable[[ServerConnection], None],
    ):
        self._key, self._receive, self._lost = key, receive, lost
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._proven = False
        # what the server remembers of the requests that came over it
        self.newest = 0  # number of the last one
        self.waits = False  # whether it waits for its answer
        self.granted: dict[int, tuple[int, int]] = {}  # (iteration, lease) of claims whose answers may not arrive
        self._frames = _Frames()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._transport.write(self._nonce)
        asyncio.get_running_loop().call_later(_CONNECT_SECONDS, self._end_unless_proven)

    def _end_unless_proven(self) -> None:
        if not self._proven:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._frames.feed(data)
        if not self._proven:
            proof = self._frames.take(_NONCE_BYTES)
            if proof is None:
                return
            if not hmac.compare_digest(proof, _proof(self._key, self._nonce)):
                self._transport.abort()
                return
            self._proven = True
        while (frame := self._frames.message()) is not None:
            try:
                self._receive(self, pickle.loads(frame))
            except Exception:  # noqa: BLE001 - whatever a client sends, the others go on
                traceback.print_exc()
                self._transport.abort()
                return

    def connection_lost(self, _error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lost(self)

    @property
    def is_closed(self) -> bool:
        """Nothing can be sent any more."""
        return bool(self._transport.is_closing())

    def send(self, message: Any) -> None:
        """Send a message; does not wait for it to be read."""
        self._transport.write(_frame(message))


def listen() -> socket.socket:
    """A listening socket on all interfaces, at a free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
