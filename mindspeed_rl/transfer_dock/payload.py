"""Payloads: the values of one put, packed in one buffer.

However many columns and rows: Ray copies one large buffer faster than several, and stores it as one object. Objects
are pickled row by row, so that a reader unpickles only the rows it asks for, and gets objects of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.spec import ColumnSpec, DockSpec

_TORCH_DTYPES = {"int64": torch.int64, "float32": torch.float32}
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")
_ALIGNMENT = 64  # bytes; a multiple of every element size, and of a cache line

Span = tuple[int, int]  # first byte and the one after the last


@dataclass(frozen=True)
class Slot:
    """Where a column's values are in a payload's buffer: pieces end to end, or one number a row for scalars.

    Row i is piece `pieces[i]`, or piece i without `pieces`: rows that were given the same tensor share one. Lengths
    and pieces are int64.
    """

    values: Span
    lengths: Span | None = None
    pieces: Span | None = None


@dataclass(frozen=True)
class Payload:
    """The values of one put: a uint8 buffer, and each column's place in it."""

    buffer: np.ndarray
    slots: dict[str, Slot]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.nbytes

    def values(self, name: str, dtype: str) -> np.ndarray:
        """All values of a column; those of objects are pickles, uint8."""
        return self._array(self.slots[name].values, "uint8" if dtype == "object" else dtype)

    def lengths(self, name: str) -> np.ndarray:
        """Length of each piece, [pieces]."""
        span = self.slots[name].lengths
        assert span is not None, "scalars have no lengths"
        return self._array(span, "int64")

    def pieces(self, name: str) -> np.ndarray | None:
        """Piece of each row, [rows]; None: row i is piece i."""
        span = self.slots[name].pieces
        return None if span is None else self._array(span, "int64")

    def row_lengths(self, name: str) -> np.ndarray:
        """Length of each row, [rows]."""
        pieces = self.pieces(name)
        return self.lengths(name) if pieces is None else self.lengths(name)[pieces]

    def lengths_for(self, spec: DockSpec) -> dict[str, np.ndarray]:
        """Row lengths of the columns that consumers are balanced by, as far as they are in here."""
        return {name: self.row_lengths(name) for name in spec.balancing if name in self.slots}

    def _array(self, span: Span, dtype: str) -> np.ndarray:
        return self.buffer[span[0] : span[1]].view(dtype)


class Scratch:
    """A buffer that is used again for every payload: touching fresh pages would cost more than the copy itself.

    For payloads that are copied on (into Ray's object store) before the next one is packed. Larger ones than `limit`
    bytes get memory of their own.
    """

    def __init__(self, limit: int = 256 << 20):
        self._limit = limit
        self._buffer = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """`nbytes` of memory with whatever is in it."""
        if nbytes > self._limit:
            return np.empty(nbytes, np.uint8)
        if nbytes > len(self._buffer):
            self._buffer = np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        return self._buffer[:nbytes]


@dataclass
class _Column:
    """Checked values of a column, to be copied: flat ones, or tensors to be put end to end."""

    values: torch.Tensor | list[torch.Tensor]
    dtype: torch.dtype
    lengths: np.ndarray | None = None
    pieces: np.ndarray | None = None

    @property
    def count(self) -> int:
        """Number of values."""
        if isinstance(self.values, torch.Tensor):
            return self.values.numel()
        assert self.lengths is not None
        return int(self.lengths.sum())


def pack(
    spec: DockSpec, rows: np.ndarray, columns: Mapping[str, Sequence[Any]], scratch: Scratch | None = None
) -> Payload:
    """Check and pack the values of a put. `DockError` names column and row.

    With `scratch` the payload is good until the next one is packed with it.
    """
    if not columns:
        raise DockError("put: no columns given")
    checked: dict[str, _Column] = {}
    for name, values in columns.items():
        if name not in spec.columns:
            raise DockError(f"put: unknown column '{name}'; there are {list(spec.columns)}")
        if len(values) != len(rows):
            raise DockError(f"put: column '{name}' has {len(values)} values for {len(rows)} rows")
        checked[name] = _CHECKS[spec.columns[name].kind](name, spec.columns[name], rows, values)
    slots, end = {}, 0
    for name, column in checked.items():
        sizes = [column.count * column.dtype.itemsize]
        sizes += [0 if array is None else array.nbytes for array in (column.lengths, column.pieces)]
        starts = []
        for size in sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        slots[name] = Slot(
            spans[0], None if column.lengths is None else spans[1], None if column.pieces is None else spans[2]
        )
    payload = Payload(np.empty(end, np.uint8) if scratch is None else scratch.take(end), slots)
    for name, column in checked.items():
        _write(payload, name, column)
    return payload


@torch.no_grad()
def _write(payload: Payload, name: str, column: _Column) -> None:
    start, stop = payload.slots[name].values
    out = torch.from_numpy(payload.buffer[start:stop]).view(column.dtype)
    if isinstance(column.values, torch.Tensor):
        np.copyto(out.numpy(), column.values.cpu().numpy())  # faster than torch on one thread
    else:
        torch.cat(column.values, out=out)
    if column.lengths is not None:
        payload.lengths(name)[:] = column.lengths
    if column.pieces is not None:
        pieces = payload.pieces(name)
        assert pieces is not None
        pieces[:] = column.pieces


def _check_jagged(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> _Column:
    dtype = _TORCH_DTYPES[column.dtype]
    if isinstance(values, Jagged):
        if values.dtype is not dtype:
            raise DockError(f"put: column '{name}': expected {column.dtype} values, got {values.dtype}")
        flat, lengths, pieces = values.distinct()
        return _Column(flat.detach(), dtype, lengths, pieces)
    tensors, pieces = _distinct(_checked_rows(name, column, rows, values))
    return _Column(tensors, dtype, np.array(list(map(torch.Tensor.numel, tensors)), np.int64), pieces)


def _checked_rows(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> Sequence[torch.Tensor]:
    """The values, on the host. Looked at in bulk: a Python loop over rows would take longer than the copy."""
    expected = _TORCH_DTYPES[column.dtype]
    if (
        all(issubclass(kind, torch.Tensor) for kind in set(map(type, values)))
        and set(map(_DTYPE, values)) == {expected}
        and set(map(torch.Tensor.dim, values)) == {1}
    ):
        if all(map(_IS_CPU, values)):
            return values
        host = {id(value): value.cpu() for value in values}
        return [host[id(value)] for value in values]
    for row, value in zip(rows, values, strict=True):
        if not isinstance(value, torch.Tensor) or value.dtype is not expected or value.ndim != 1:
            raise DockError(
                f"put: column '{name}', row {row}: expected a 1-D {column.dtype} tensor, got {_kind(value)}"
            )
    return values


def _distinct(values: Sequence[Any]) -> tuple[list[Any], np.ndarray | None]:
    """The different objects among `values`, and which of them each value is (None: all differ)."""
    first = dict(zip(map(id, values), values, strict=True))
    if len(first) == len(values):
        return list(values), None
    number = {key: index for index, key in enumerate(first)}
    return list(first.values()), np.array([number[id(value)] for value in values], np.int64)


def _check_scalar(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> _Column:
    kinds, dtype = "if" if column.dtype == "float32" else "i", _TORCH_DTYPES[column.dtype]
    if isinstance(values, torch.Tensor):
        if values.ndim != 1 or values.dtype != dtype:
            raise DockError(f"put: column '{name}': expected one 1-D {column.dtype} tensor, got {_kind(values)}")
        return _Column(values.detach(), dtype)
    for row, value in zip(rows, values, strict=True):
        item = np.asarray(value)
        if item.ndim or item.dtype.kind not in kinds:
            raise DockError(
                f"put: column '{name}', row {row}: expected a number ({column.dtype}), got {_kind(value)}"
            )
    return _Column(torch.from_numpy(np.asarray(values, column.dtype)), dtype)


def _check_object(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> _Column:
    objects, pieces = _distinct(values)
    pickles = []
    for index, value in enumerate(objects):
        try:
            pickles.append(np.frombuffer(pickle.dumps(value, protocol=5), np.uint8))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            row = rows[index if pieces is None else int(np.argmax(pieces == index))]
            raise DockError(f"put: column '{name}', row {row}: {_kind(value)} cannot be pickled: {error}") from error
    lengths = np.array([len(data) for data in pickles], np.int64)
    return _Column(torch.from_numpy(np.concatenate(pickles)), torch.uint8, lengths, pieces)


_CHECKS = {"jagged": _check_jagged, "scalar": _check_scalar, "object": _check_object}


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"
