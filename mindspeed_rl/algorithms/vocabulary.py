"""An output layer whose vocabulary is split over tensor-parallel ranks, for a chunk of rows at a time.

Logits are the largest thing that there is: neither all of them nor the whole vocabulary of a row ever exists. They
are made of hidden states, which are small, in the forward pass and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.device.kernels import add_product


@dataclass(frozen=True)
class OutputLayer:
    """This rank's columns of the vocabulary.

    Attributes:
        group: the tensor-parallel group, of which rank i of tp holds columns i·V/tp onwards; None: it holds all.
        vocab_size: size of the real vocabulary; columns from there on are padding and count as impossible.
        temperature: divisor of the logits, as in sampling.
        chunk: rows worked off at a time.

    Raises:
        ValueError: temperature or chunk not positive.
    """

    group: dist.ProcessGroup | None
    vocab_size: int
    temperature: float
    chunk: int

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature = {self.temperature}: must be > 0")
        if self.chunk < 1:
            raise ValueError(f"chunk = {self.chunk}: must be >= 1")

    def check(self, hidden: Tensor, weight: Tensor) -> None:
        """Raise ValueError, with the shapes, unless these are [N, h] and [V/tp, h], and V reaches `vocab_size`."""
        if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
            shapes = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
            raise ValueError(f"hidden and weight are {shapes}: must be [N, h] and [V/tp, h]")
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        if len(weight) * ranks < self.vocab_size:
            raise ValueError(
                f"weight has {len(weight)} rows on {ranks} ranks: fewer than vocab_size {self.vocab_size}"
            )

    def first(self, weight: Tensor) -> int:
        """Index of this rank's first column in the whole vocabulary."""
        return 0 if self.group is None else dist.get_rank(self.group) * len(weight)

    def real(self, weight: Tensor) -> int:
        """How many of this rank's columns are not padding: its first ones."""
        return min(max(self.vocab_size - self.first(weight), 0), len(weight))

    def parts(self, rows: int, weight: Tensor) -> Iterator[slice]:
        """All rows, a chunk at a time; none if this rank has nothing but padding."""
        if self.real(weight):
            for start in range(0, rows, self.chunk):
                yield slice(start, min(start + self.chunk, rows))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Of rows [n, h], without padding: [n, real]."""
        # the product includes the padding, so that equal models have equal bits however it is divided
        return (hidden @ weight.t())[:, : self.real(weight)]

    def own_column(self, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target on this rank (0 where another rank holds it), and whether this rank holds it."""
        local = targets - self.first(weight)
        is_mine = (local >= 0) & (local < self.real(weight))
        return torch.where(is_mine, local, 0), is_mine

    def all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """In place, over the ranks that share the vocabulary."""
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)


class Gradients:
    """Gradients of hidden states and weights, from those of logits, chunk by chunk.

    Those of the weights are added up in float32, or wider; frozen ones have none. The loss is taken to be the same on
    all ranks of the group (each computes it in full): what a rank's columns contribute to the gradient of the hidden
    states is added up.
    """

    def __init__(self, layer: OutputLayer, hidden: Tensor, weight: Tensor, is_trained: bool):
        self._layer, self._hidden, self._weight = layer, hidden, weight
        self._of_hidden = torch.zeros_like(hidden)
        self._of_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if is_trained else None

    def add(self, part: slice, of_logits: Tensor) -> None:
        """Of the rows `part`; [n, real] in the logits' dtype."""
        real = of_logits.shape[1]
        self._of_hidden[part] = of_logits @ self._weight[:real]
        if self._of_weight is not None:
            add_product(self._of_weight[:real], of_logits.t(), self._hidden[part])

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Of hidden states and weights, in their dtypes."""
        self._layer.all_reduce(self._of_hidden)
        return self._of_hidden, None if self._of_weight is None else self._of_weight.to(self._weight.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over the vocabulary are computed in: float32, or float64 for what is so already."""
    return torch.promote_types(dtype, torch.float32)
