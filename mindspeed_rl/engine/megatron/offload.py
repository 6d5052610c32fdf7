"""Moves tensors between device and host in place: every view of a tensor's storage stays valid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from mindspeed_rl.device.base import Device

# of one host buffer: allocators of page-locked memory round sizes up to powers of two, which could cost as much again
PIECE_BYTES = 1 << 26


class HostMemory:
    """Tensors that can be away from the device. Copies are queued on a stream of their own.

    Args:
        device: where they live while present.
        contents: "changing" are copied to the host each time; "frozen" are copied the first time only, and stay
            there; "dropped" are not kept, and come back as zeros.
    """

    def __init__(self, device: Device, contents: Literal["changing", "frozen", "dropped"] = "changing"):
        self.device, self.contents = device, contents
        self._stream = device.side_stream()
        self._away: list[tuple[torch.Tensor, int, list[torch.Tensor]]] = []  # with their bytes, and the host's copy
        self._frozen: list[list[torch.Tensor]] = []

    @property
    def is_away(self) -> bool:
        """True between `offload` and `onload`."""
        return bool(self._away)

    @torch.no_grad()
    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release the device memory of `tensors`, each the owner of its whole storage."""
        assert not self._away, "these tensors are away already"
        with self.device.queue_on(self._stream):
            for index, tensor in enumerate(tensors):
                self._away.append((tensor, tensor.untyped_storage().nbytes(), self._host_copy(index, tensor)))
        self.device.wait_stream(self._stream)
        self.device.synchronize()  # once, for all: the copies must be complete before their sources are freed
        for tensor, _, _ in self._away:
            tensor.untyped_storage().resize_(0)
        self.device.empty_cache()

    def _host_copy(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self.contents == "dropped":
            return []
        if self.contents == "frozen" and index < len(self._frozen):
            return self._frozen[index]
        pieces = _storage_bytes(tensor).split(PIECE_BYTES)
        host = [self.device.empty_pinned(len(piece)).copy_(piece, non_blocking=True) for piece in pieces]
        if self.contents == "frozen":
            self._frozen.append(host)
        return host

    @torch.no_grad()
    def onload(self) -> None:
        """Begin to bring everything back; a no-op if nothing is away. `ready` comes before the first use."""
        for tensor, size, _ in self._away:
            tensor.untyped_storage().resize_(size)
        with self.device.queue_on(self._stream):
            for tensor, _, host in self._away:
                pieces = _storage_bytes(tensor).split(PIECE_BYTES)
                if self.contents == "dropped":
                    tensor.detach().zero_()
                for piece, copy in zip(pieces, host, strict=self.contents != "dropped"):
                    piece.copy_(copy, non_blocking=True)
        self._away.clear()  # page-locked memory is not given to others before copies from it are complete

    def ready(self) -> None:
        """What the current stream does from here on sees what was brought back; the host does not wait."""
        self.device.wait_stream(self._stream)


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
