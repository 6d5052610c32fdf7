"""Moves tensors between device and host in place: every view of a tensor's storage stays valid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from mindspeed_rl.device.base import Device


class HostMemory:
    """Tensors that can be away from the device.

    Args:
        device: where they live while present.
        contents: "changing" are copied to the host each time; "frozen" are copied the first time only, and stay
            there; "dropped" are not kept, and come back as zeros.
    """

    def __init__(self, device: Device, contents: Literal["changing", "frozen", "dropped"] = "changing"):
        self.device, self.contents = device, contents
        self._away: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self._frozen: list[torch.Tensor] = []

    @property
    def is_away(self) -> bool:
        """True between `offload` and `onload`."""
        return bool(self._away)

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release the device memory of `tensors`, each the owner of its whole storage."""
        assert not self._away, "these tensors are away already"
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                host = self._host_copy(index, tensor)
                self._away.append((tensor, tensor.untyped_storage().nbytes(), host))
            self.device.synchronize()  # the copies must be complete before their sources are freed
            for tensor, _, _ in self._away:
                tensor.untyped_storage().resize_(0)
        self.device.empty_cache()

    def _host_copy(self, index: int, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.contents == "dropped":
            return None
        if self.contents == "changing":
            return self.device.pin(tensor.detach())
        if index == len(self._frozen):
            self._frozen.append(self.device.pin(tensor.detach()))
        return self._frozen[index]

    def onload(self) -> None:
        """Bring everything back; a no-op if nothing is away."""
        with torch.no_grad():
            for tensor, size, host in self._away:
                tensor.untyped_storage().resize_(size)
                if host is None:
                    tensor.detach().zero_()
                else:
                    tensor.detach().copy_(host, non_blocking=True)
        self.device.synchronize()
        self._away.clear()
