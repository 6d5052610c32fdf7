"""Writing a rank's part of a checkpoint while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from mindspeed_rl.checkpoint.state import CheckpointStore
from mindspeed_rl.checkpoint.tensors import Piece
from mindspeed_rl.device.base import Device

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Copies a rank's part to the host and writes it in a thread, which communicates with nobody.

    The driver sees in the pending checkpoint's folder that it was written, or that it failed.
    """

    def __init__(self, device: Device):
        self.device = device
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._future: Future[None] | None = None

    def write(
        self, store: CheckpointStore, iteration: int, rank: int, pieces: Sequence[Piece], state: Mapping[str, Any]
    ) -> None:
        """`CheckpointStore.write_rank`, of which only the copying has been done on return."""
        copies = [replace(piece, data=self._host_copy(piece.data)) for piece in pieces]
        self.device.synchronize()
        written = self._thread.submit(store.write_rank, iteration, rank, copies, state)
        self._future = self._thread.submit(_report, store, iteration, rank, written)

    def _host_copy(self, data: torch.Tensor) -> torch.Tensor:
        host = self.device.empty_pinned(data.nbytes).view(data.dtype).view(data.shape)
        return host.copy_(data, non_blocking=True)

    def wait(self) -> None:
        """Until all is written; raises what stopped it."""
        if self._future is not None:
            self._future.result()


def _report(store: CheckpointStore, iteration: int, rank: int, written: Future[None]) -> None:
    if error := written.exception():
        logger.error("checkpoint %d was not written", iteration, exc_info=error)
        store.report_failure(iteration, rank, error)
        raise error
