"""Payloads: the values of one put, each column's in one flat array, however many rows.

Ray copies flat arrays into its object store as they lie and maps them from there, so what is flat already is copied
once. Objects are pickled row by row: a reader unpickles only the rows it asks for, and gets objects of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.arrays import Shared
from mindspeed_rl.transfer_dock.checks import instance
from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.spec import ColumnSpec, DockSpec

_TORCH_DTYPES = {"int64": torch.int64, "float32": torch.float32}
_ALIGNMENT = 64  # bytes: a cache line
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")


@dataclass(frozen=True)
class Values:
    """Values of a column: pieces end to end, or one number a row for scalars. Objects are pickled: uint8.

    Row i is piece `pieces[i]`, or piece i without `pieces`: rows that were given the same tensor share one. Lengths
    of pieces, and pieces, are int64.
    """

    flat: np.ndarray
    lengths: np.ndarray | None = None
    pieces: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.flat, self.lengths, self.pieces) if array is not None)

    @property
    def row_lengths(self) -> np.ndarray:
        """Length of each row, [rows]."""
        assert self.lengths is not None, "scalars have no lengths"
        return self.lengths if self.pieces is None else self.lengths[self.pieces]


@dataclass(frozen=True, eq=False)
class Payload:
    """The values of one put, by column; equal to itself only.

    memory: uint8 in which the values of columns lie that came row by row. It is pickled as one buffer, which Ray
        copies faster than one for each column.
    """

    columns: dict[str, Values]
    memory: np.ndarray

    def __reduce__(self) -> tuple[Any, ...]:
        columns = {
            name: (_place(values.flat, self.memory), values.lengths, values.pieces)
            for name, values in self.columns.items()
        }
        return _restored, (self.memory, columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(values.nbytes for values in self.columns.values())

    def lengths_for(self, spec: DockSpec) -> dict[str, np.ndarray]:
        """Row lengths of the columns that consumers are balanced by, as far as they are in here."""
        return {name: self.columns[name].row_lengths for name in spec.balancing if name in self.columns}


def _place(array: np.ndarray, memory: np.ndarray) -> np.ndarray | tuple[np.dtype, int, int]:
    """An array that lies in `memory` as its dtype, and where in it; any other array as it is."""
    start = array.ctypes.data - memory.ctypes.data
    return (array.dtype, start, start + array.nbytes) if 0 <= start < memory.nbytes else array


def _restored(memory: np.ndarray, columns: Mapping[str, tuple[Any, Any, Any]]) -> Payload:
    found = {}
    for name, (flat, lengths, pieces) in columns.items():
        if isinstance(flat, tuple):
            dtype, start, stop = flat
            flat = memory[start:stop].view(dtype)
        found[name] = Values(flat, lengths, pieces)
    return Payload(found, memory)


class Scratch:
    """Memory that is used again for every payload: touching fresh pages would cost more than the copy itself.

    For payloads that are copied on (into Ray's object store) before the next one is packed, or a value changes. A
    payload of more than `limit` bytes gets memory of its own.
    """

    def __init__(self, limit: int = 1 << 30):
        self._limit = limit
        self._memory = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """`nbytes` of memory with whatever is in it."""
        if nbytes > self._limit:
            return np.empty(nbytes, np.uint8)
        if nbytes > len(self._memory):
            self._memory = np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        return self._memory[:nbytes]


@dataclass
class _Column:
    """Checked values of a column: flat, or tensors to be put end to end."""

    values: torch.Tensor | list[torch.Tensor]
    lengths: np.ndarray | None = None
    pieces: np.ndarray | None = None


@torch.no_grad()
def pack(
    spec: DockSpec, rows: np.ndarray, columns: Mapping[str, Sequence[Any]], scratch: Scratch | None = None
) -> Payload:
    """Check and pack the values of a put. `DockError` names column and row.

    With `scratch` the payload is good until the next one is packed with it, and shares memory with flat values.
    """
    if not columns:
        raise DockError("put: no columns given")
    instance("columns of a put", columns, Mapping)
    checked: dict[str, _Column] = {}
    for name, values in columns.items():
        if name not in spec.columns:
            raise DockError(f"put: unknown column '{name}'; there are {list(spec.columns)}")
        if not isinstance(values, Sequence | np.ndarray | torch.Tensor) or isinstance(values, str | bytes):
            raise DockError(f"put: column '{name}': expected a sequence of one value a row, got {_kind(values)}")
        if isinstance(values, torch.Tensor | np.ndarray) and not values.ndim:
            raise DockError(f"put: column '{name}': expected a sequence of one value a row, got {_kind(values)}")
        if len(values) != len(rows):
            raise DockError(f"put: column '{name}' has {len(values)} values for {len(rows)} rows")
        checked[name] = _CHECKS[spec.columns[name].kind](name, spec.columns[name], rows, values)
    flat, memory = _flatten(spec, checked, scratch)
    shared = Shared()
    return Payload(
        {
            name: Values(
                flat[name],
                None if column.lengths is None else shared(column.lengths),
                None if column.pieces is None else shared(column.pieces),
            )
            for name, column in checked.items()
        },
        memory,
    )


def _flatten(
    spec: DockSpec, columns: Mapping[str, _Column], scratch: Scratch | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Each column's values in one array, and the memory in which those lie that were several tensors."""
    flat, places, end = dict[str, np.ndarray](), dict[str, slice](), 0
    for name, column in columns.items():
        if isinstance(column.values, torch.Tensor):
            given = column.values.detach().cpu().contiguous().numpy()
            flat[name] = given.copy() if scratch is None else given
        else:
            assert column.lengths is not None
            places[name] = slice(end, end + int(column.lengths.sum()) * np.dtype(spec.columns[name].dtype).itemsize)
            end = -(-places[name].stop // _ALIGNMENT) * _ALIGNMENT
    memory = np.empty(end, np.uint8) if scratch is None else scratch.take(end)
    for name, place in places.items():
        flat[name] = memory[place].view(spec.columns[name].dtype)
        torch.cat(cast("list[torch.Tensor]", columns[name].values), out=torch.from_numpy(flat[name]))
    return flat, memory


def _check_jagged(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> _Column:
    dtype = _TORCH_DTYPES[column.dtype]
    if isinstance(values, Jagged):
        if values.dtype is not dtype:
            raise DockError(f"put: column '{name}': expected {column.dtype} values, got {values.dtype}")
        flat, lengths, pieces = values.distinct()
        return _Column(flat, lengths, pieces)
    tensors, pieces = _distinct(_checked_rows(name, column, rows, values))
    return _Column(tensors, np.array(list(map(torch.Tensor.numel, tensors)), np.int64), pieces)


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
    values = list(values)  # what a sequence makes when it is asked has an identity only while it is kept
    first = dict(zip(map(id, values), values, strict=True))
    if len(first) == len(values):
        return values, None
    number = {key: index for index, key in enumerate(first)}
    return list(first.values()), np.array([number[id(value)] for value in values], np.int64)


def _check_scalar(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> _Column:
    kinds, dtype = "if" if column.dtype == "float32" else "i", _TORCH_DTYPES[column.dtype]
    if isinstance(values, torch.Tensor):
        if values.ndim != 1 or values.dtype != dtype:
            raise DockError(f"put: column '{name}': expected one 1-D {column.dtype} tensor, got {_kind(values)}")
        return _Column(values)
    for row, value in zip(rows, values, strict=True):
        try:
            item = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):  # bfloat16, lists of different lengths, values on a device
            item = None
        if item is None or item.ndim or item.dtype.kind not in kinds:
            raise DockError(
                f"put: column '{name}', row {row}: expected a number ({column.dtype}), got {_kind(value)}"
            )
    return _Column(torch.from_numpy(np.asarray(values, column.dtype)))


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
    return _Column(torch.from_numpy(np.concatenate(pickles)), lengths, pieces)


_CHECKS = {"jagged": _check_jagged, "scalar": _check_scalar, "object": _check_object}


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"
