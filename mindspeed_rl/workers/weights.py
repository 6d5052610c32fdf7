"""The actor's weights on their way from training devices to rollout devices, through host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import ray
import torch

from mindspeed_rl.resharding.plan import ALIGNMENT
from mindspeed_rl.transfer_dock.reader import as_tensor


@dataclass(frozen=True)
class WeightSlot:
    """A tensor's place in a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes
    stop: int


@dataclass(frozen=True)
class WeightBucket:
    """Some tensors end to end, in one buffer that Ray hands out without a copy on its node."""

    slots: tuple[WeightSlot, ...]
    values: np.ndarray  # uint8


def pack_weights(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Host copies of `weights` in buckets of at most `bucket_bytes`, or of one tensor where that is larger."""
    slots: list[WeightSlot] = []
    pieces: list[torch.Tensor] = []
    for name, tensor in weights:
        piece = tensor.detach().to("cpu", copy=True).flatten().view(torch.uint8)
        start = sum(len(p) for p in pieces)
        if slots and start + len(piece) > bucket_bytes:
            yield _bucket(slots, pieces)
            slots, pieces, start = [], [], 0
        slots.append(WeightSlot(name, tensor.dtype, tuple(tensor.shape), start, start + len(piece)))
        pieces += [piece, torch.zeros(-len(piece) % ALIGNMENT, dtype=torch.uint8)]
    if slots:
        yield _bucket(slots, pieces)


def _bucket(slots: list[WeightSlot], pieces: list[torch.Tensor]) -> WeightBucket:
    return WeightBucket(tuple(slots), torch.cat(pieces).numpy())


def unpack_weights(buckets: Iterable[WeightBucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by name, as views of the buckets: to be read or copied, not written."""
    for bucket in buckets:
        flat = as_tensor(bucket.values)
        for slot in bucket.slots:
            yield slot.name, flat[slot.start : slot.stop].view(slot.dtype).view(slot.shape)


@dataclass(frozen=True)
class PublishedWeights:
    """One version of the weights."""

    refs: list[ray.ObjectRef]  # of its buckets
    checksums: Mapping[str, int]  # of the tensors, as the training ranks hold them; with `validate_weight` only


class WeightBoard:
    """A Ray actor that keeps published weights in the object store, by version: completed iterations.

    It keeps two, so that all ranks of a rollout engine find the version that one of them has looked up although
    another is published meanwhile. Host memory, on the node of training rank 0 and on every node that generates, is
    thus bounded by two copies of the weights, in the precision of training.
    """

    KEPT = 2

    def __init__(self) -> None:
        self._versions: dict[int, PublishedWeights] = {}

    def put(self, version: int, weights: PublishedWeights) -> None:
        """Offer a version."""
        self._versions[version] = weights
        for old in sorted(self._versions)[: -self.KEPT]:
            del self._versions[old]

    def newest(self) -> int:
        """The newest version there is; some version has been put before anybody asks."""
        return max(self._versions)

    def get(self, version: int) -> PublishedWeights:
        """One of the two newest versions."""
        return self._versions[version]
