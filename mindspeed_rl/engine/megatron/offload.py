"""Moves tensors between device and host in place: every view of a tensor's storage stays valid."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mindspeed_rl.device.base import Device


class HostMemory:
    """Tensors that can be away from the device.

    Args:
        device: where they live while present.
        keep: True: contents are copied to the host and back. False: they are dropped, and come back as zeros.
    """

    def __init__(self, device: Device, keep: bool = True):
        self.device, self.keep = device, keep
        self._away: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []

    @property
    def is_away(self) -> bool:
        """True between `offload` and `onload`."""
        return bool(self._away)

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release the device memory of `tensors`, each the owner of its whole storage."""
        assert not self._away, "these tensors are away already"
        with torch.no_grad():
            for tensor in tensors:
                host = self.device.pin(tensor.detach()) if self.keep else None
                self._away.append((tensor, tensor.untyped_storage().nbytes(), host))
            self.device.synchronize()  # the copies must be complete before their sources are freed
            for tensor, _, _ in self._away:
                tensor.untyped_storage().resize_(0)
        self.device.empty_cache()

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
