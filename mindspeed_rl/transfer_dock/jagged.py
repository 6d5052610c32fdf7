"""Rows of different lengths over flat memory: what jagged columns are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import overload

import numpy as np
import torch


@dataclass(frozen=True)
class _Run:
    """Some rows of one flat tensor: row i is `values[bounds[pieces[i]] : bounds[pieces[i] + 1]]`."""

    values: torch.Tensor
    bounds: np.ndarray
    pieces: np.ndarray

    @cached_property
    def piece_lengths(self) -> np.ndarray:
        """Length of every piece."""
        return np.diff(self.bounds)

    @cached_property
    def in_order(self) -> bool:
        """Rows follow each other as the pieces do, with none left out in between."""
        return len(self.pieces) > 0 and bool((np.diff(self.pieces) == 1).all())

    def views(self) -> list[torch.Tensor]:
        """All rows."""
        low, high = int(self.pieces.min()), int(self.pieces.max()) + 1
        if high - low > 2 * len(self.pieces):  # far apart: cut out one by one
            starts, stops = self.bounds[self.pieces].tolist(), self.bounds[self.pieces + 1].tolist()
            return [self.values[start:stop] for start, stop in zip(starts, stops, strict=True)]
        part = self.values[int(self.bounds[low]) : int(self.bounds[high])]
        views = part.split(np.diff(self.bounds[low : high + 1]).tolist())
        return [views[piece] for piece in (self.pieces - low).tolist()]


class Jagged(Sequence[torch.Tensor]):
    """A sequence of 1-D tensors that are views of few flat ones, made when they are looked at.

    Args:
        values: 1-D, the pieces end to end.
        lengths: of each piece; they add up to `len(values)`.
        pieces: which piece each row is; None: row i is piece i. Rows may share a piece, as a group shares its prompt.

    Raises:
        ValueError: values are not 1-D, lengths do not add up, or a piece does not exist.
    """

    def __init__(
        self,
        values: torch.Tensor,
        lengths: Sequence[int] | np.ndarray | torch.Tensor,
        pieces: Sequence[int] | np.ndarray | torch.Tensor | None = None,
    ):
        bounds = np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64))))
        if values.ndim != 1 or bounds[-1] != len(values) or (np.diff(bounds) < 0).any():
            raise ValueError(f"lengths adding up to {bounds[-1]} for values of shape {tuple(values.shape)}")
        rows = np.arange(len(bounds) - 1) if pieces is None else np.array(pieces, np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(bounds) - 1:
            raise ValueError(f"pieces from {rows.min()} to {rows.max()}: there are {len(bounds) - 1}")
        self._set([_Run(values, bounds, rows)])

    @classmethod
    def joined(cls, runs: Sequence[tuple[torch.Tensor, np.ndarray, np.ndarray]]) -> Jagged:
        """Rows of several flat tensors, one after the other: (values, bounds [pieces + 1], pieces [rows]) of each."""
        joined = cls.__new__(cls)
        joined._set([_Run(*run) for run in runs])
        return joined

    def _set(self, runs: list[_Run]) -> None:
        self._runs = runs
        self._ends = list(accumulate(len(run.pieces) for run in runs))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        number = next(number for number, end in enumerate(self._ends) if index < end)
        run = self._runs[number]
        piece = run.pieces[index - self._ends[number] + len(run.pieces)]
        return run.values[int(run.bounds[piece]) : int(run.bounds[piece + 1])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for run in self._runs:
            if len(run.pieces):
                yield from run.views()

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the values; None without any row."""
        return self._runs[0].values.dtype if self._runs else None

    @property
    def lengths(self) -> np.ndarray:
        """Length of every row, [rows] int64."""
        sizes = [run.bounds[run.pieces + 1] - run.bounds[run.pieces] for run in self._runs]
        return np.concatenate(sizes) if sizes else np.empty(0, np.int64)

    @property
    def values(self) -> torch.Tensor:
        """The rows end to end: without a copy if that is how they lie."""
        if len(self._runs) == 1:
            run = self._runs[0]
            if run.in_order:
                return run.values[int(run.bounds[run.pieces[0]]) : int(run.bounds[run.pieces[-1] + 1])]
        return torch.cat(list(self)) if len(self) else torch.empty(0)

    def distinct(self) -> tuple[torch.Tensor, np.ndarray, np.ndarray | None]:
        """Values, length of every piece, and which piece each row is (None: row i is piece i), each piece once."""
        if len(self._runs) == 1:
            run = self._runs[0]
            if run.in_order and len(run.pieces) == len(run.bounds) - 1:
                return run.values, run.piece_lengths, None
            used = np.unique(run.pieces)
            if len(used) == len(run.bounds) - 1:
                return run.values, run.piece_lengths, run.pieces
        return self.values, self.lengths, None
