"""Where the rows of a shard lie in the Hugging Face tensors.

Nothing here knows how parameters are merged and cut: the rule of the name table (`names.Parameter.shard`), applied to
numbered rows instead of weights, tells where every row goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from mindspeed_rl.resharding.names import Parameter, Shape


@dataclass(frozen=True)
class Slab:
    """Rows of a shard that follow each other in a Hugging Face tensor as well."""

    tensor: int  # which of the parameter's Hugging Face tensors
    rows: range  # of the shard
    start: int  # row of the tensor that the first of them is
    columns: slice  # of the tensor: all of them, but where tensor parallelism cuts columns

    def within(self, rows: range) -> Slab | None:
        """The part that lies in `rows` of the shard."""
        start, stop = max(self.rows.start, rows.start), min(self.rows.stop, rows.stop)
        if start >= stop:
            return None
        return replace(self, rows=range(start, stop), start=self.start + start - self.rows.start)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A view of the slab in the parameter's Hugging Face tensors."""
        rows = tensors[self.tensor][self.start : self.start + len(self.rows)]
        return rows if rows.dim() == 1 else rows[:, self.columns]


def slabs(parameter: Parameter, tp_rank: int, tp_size: int) -> tuple[Slab, ...]:
    """The shard of rank `tp_rank` of `tp_size`, in the order of its rows, but for those that pad the vocabulary."""
    anonymous = replace(parameter, name="", hf_names=("",) * len(parameter.hf_names), layer=None, expert=None)
    return _slabs(anonymous, tp_rank, tp_size)


@lru_cache(maxsize=4096)  # layers and experts share a dozen shapes, on each of the tensor-parallel ranks
def _slabs(parameter: Parameter, tp_rank: int, tp_size: int) -> tuple[Slab, ...]:
    tp_size = 1 if parameter.tp_dim is None else tp_size
    columns = slice(None)
    if parameter.tp_dim == 1:
        width = parameter.hf_shapes[0][1] // tp_size
        columns = slice(tp_rank * width, (tp_rank + 1) * width)
    narrow = replace(parameter, hf_shapes=tuple(_narrow(s, parameter.tp_dim, tp_size) for s in parameter.hf_shapes))
    firsts, numbered, first = [], [], 1  # 0: padding
    for shape in narrow.hf_shapes:
        rows = torch.arange(first, first + shape[0])
        numbered.append((rows if len(shape) == 1 else rows[:, None]).expand(shape))
        firsts.append(first)
        first += shape[0] + 1  # a gap, so that no run reaches into the next tensor
    row_numbers = narrow.shard(narrow.from_hf(numbered), tp_rank, tp_size).flatten()
    breaks = (row_numbers.diff() != 1).nonzero().flatten() + 1
    found = []
    for run in torch.tensor_split(torch.arange(len(row_numbers)), breaks):
        number, start = int(row_numbers[run[0]]), int(run[0])
        if number:
            tensor = max(index for index, first in enumerate(firsts) if first <= number)
            found.append(Slab(tensor, range(start, start + len(run)), number - firsts[tensor], columns))
    return tuple(found)


def _narrow(shape: Shape, tp_dim: int | None, tp_size: int) -> Shape:
    """As few columns as can be cut in the same way."""
    return shape if len(shape) == 1 else (shape[0], tp_size if tp_dim == 1 else 1)
