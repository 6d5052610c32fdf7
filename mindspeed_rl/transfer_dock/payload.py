"""Payloads: the values of one put, packed; and reading a claim's rows out of them.

A payload maps each column to a `Packed` array, so that it is stored as a few large buffers, however many rows it
holds. Objects are pickled row by row: a reader unpickles only the rows it asks for, and gets objects of its own.
"""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.spec import Claim, ColumnSpec, DockSpec

_TORCH_DTYPES = {"int64": torch.int64, "float32": torch.float32}
_ABSENT = 0  # payload ids start at 1


@dataclass(frozen=True)
class Packed:
    """One column of a payload: pieces end to end, or one number a row for scalars (`lengths` None).

    Row i is piece `pieces[i]`, or piece i if `pieces` is None: rows that were given the same tensor share one.
    Objects are pickles in `values`, uint8.
    """

    values: np.ndarray
    lengths: np.ndarray | None = None  # [pieces] int64
    pieces: np.ndarray | None = None  # [rows] int64

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.values, self.lengths, self.pieces) if array is not None)

    @property
    def row_lengths(self) -> np.ndarray:
        """Length of every row, [rows] int64."""
        assert self.lengths is not None
        return self.lengths if self.pieces is None else self.lengths[self.pieces]


Payload = dict[str, Packed]


class Scratch:
    """Memory that packing writes to and that is used again: touching fresh pages would cost more than the copy.

    For payloads that are copied on (into Ray's object store) before the next one is packed. Kept up to `limit` bytes.
    """

    def __init__(self, limit: int = 256 << 20):
        self._limit = limit
        self._buffer = np.empty(0, np.uint8)
        self._used = 0

    def start(self, nbytes: int) -> None:
        """Take over for a payload whose jagged values are `nbytes` in all."""
        self._used = 0
        if nbytes > len(self._buffer):
            self._buffer = np.empty(nbytes if nbytes > self._limit else 1 << (nbytes - 1).bit_length(), np.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements of uninitialised memory."""
        nbytes = count * dtype.itemsize
        start, self._used = self._used, self._used + -(-nbytes // 64) * 64
        return torch.from_numpy(self._buffer[start : start + nbytes]).view(dtype)

    def done(self) -> None:
        """Let go of memory beyond the limit."""
        if len(self._buffer) > self._limit:
            self._buffer = np.empty(0, np.uint8)


def pack(
    spec: DockSpec, rows: np.ndarray, columns: Mapping[str, Sequence[Any]], scratch: Scratch | None = None
) -> tuple[Payload, int]:
    """Check and pack the values of a put; returns the payload and its bytes. `DockError` names column and row.

    With `scratch` the payload is good until the next one is packed with it.
    """
    if not columns:
        raise DockError("put: no columns given")
    payload: dict[str, Packed] = {}
    jagged: dict[str, list[torch.Tensor]] = {}
    for name, values in columns.items():
        if name not in spec.columns:
            raise DockError(f"put: unknown column '{name}'; there are {list(spec.columns)}")
        if len(values) != len(rows):
            raise DockError(f"put: column '{name}' has {len(values)} values for {len(rows)} rows")
        column = spec.columns[name]
        if column.kind == "jagged":
            jagged[name], pieces = _distinct(_checked_jagged(name, column, rows, values))
            lengths = np.array([piece.numel() for piece in jagged[name]], np.int64)
            payload[name] = Packed(np.empty(0), lengths, pieces)
        elif column.kind == "scalar":
            payload[name] = _pack_scalar(name, column, rows, values)
        else:
            payload[name] = _pack_object(name, rows, values)
    if scratch is not None:
        scratch.start(sum(_padded(payload[name].lengths, spec.columns[name].dtype) for name in jagged))
    for name, tensors in jagged.items():
        dtype, packed = _TORCH_DTYPES[spec.columns[name].dtype], payload[name]
        assert packed.lengths is not None
        total = int(packed.lengths.sum())
        out = torch.empty(total, dtype=dtype) if scratch is None else scratch.take(total, dtype)
        payload[name] = replace(packed, values=torch.cat(tensors, out=out).numpy())
    return payload, sum(packed.nbytes for packed in payload.values())


def _padded(lengths: np.ndarray | None, dtype: str) -> int:
    assert lengths is not None
    return int(lengths.sum()) * np.dtype(dtype).itemsize + 64


def _checked_jagged(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> Sequence[torch.Tensor]:
    """The values as plain tensors on the host."""
    expected = _TORCH_DTYPES[column.dtype]
    if all(isinstance(value, torch.Tensor) for value in values):
        kinds = {(value.dtype, value.ndim, value.is_cpu, value.requires_grad) for value in values}
        if kinds == {(expected, 1, True, False)}:
            return values
        if {kind[:2] for kind in kinds} == {(expected, 1)}:
            host = {id(value): value.detach().cpu() for value in values}
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


def _pack_scalar(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> Packed:
    kinds = "if" if column.dtype == "float32" else "i"
    if isinstance(values, torch.Tensor):
        if values.ndim != 1 or values.dtype != _TORCH_DTYPES[column.dtype]:
            raise DockError(f"put: column '{name}': expected one 1-D {column.dtype} tensor, got {_kind(values)}")
        return Packed(np.array(values.detach().cpu().numpy()))  # a copy: the caller may write to its tensor
    for row, value in zip(rows, values, strict=True):
        item = np.asarray(value)
        if item.ndim or item.dtype.kind not in kinds:
            raise DockError(
                f"put: column '{name}', row {row}: expected a number ({column.dtype}), got {_kind(value)}"
            )
    return Packed(np.asarray(values, column.dtype))


def _pack_object(name: str, rows: np.ndarray, values: Sequence[Any]) -> Packed:
    objects, pieces = _distinct(values)
    pickles = []
    for index, value in enumerate(objects):
        try:
            pickles.append(np.frombuffer(pickle.dumps(value, protocol=5), np.uint8))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            row = rows[index if pieces is None else int(np.argmax(pieces == index))]
            raise DockError(f"put: column '{name}', row {row}: {_kind(value)} cannot be pickled: {error}") from error
    return Packed(np.concatenate(pickles), np.array([len(data) for data in pickles], np.int64), pieces)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory, without a copy.

    Arrays in Ray's object store are marked read-only, which torch has no notion of. The mark is lifted here on
    purpose; that nobody writes is part of the dock's contract (`TransferDock.get`).
    """
    return torch.from_numpy(np.asarray(_Unlocked(array)) if not array.flags.writeable else array)


class _Unlocked:
    """Presents an array's memory as writable, and keeps the array alive (numpy holds on to this object)."""

    def __init__(self, array: np.ndarray):
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


class _Column:
    """A `Packed` column made ready for reading rows."""

    def __init__(self, packed: Packed):
        self._packed = packed

    @cached_property
    def _tensor(self) -> torch.Tensor:
        return as_tensor(self._packed.values)

    @cached_property
    def _starts(self) -> np.ndarray:
        assert self._packed.lengths is not None
        return np.concatenate(([0], np.cumsum(self._packed.lengths)))

    def _pieces(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._packed.pieces is None else self._packed.pieces[rows]

    def jagged(self, rows: np.ndarray) -> list[torch.Tensor]:
        """Values of rows, views."""
        pieces = self._pieces(rows)
        low, high = int(pieces.min()), int(pieces.max()) + 1
        if high - low > 2 * len(pieces):  # far apart: cut out one by one
            starts, stops = self._starts[pieces].tolist(), self._starts[pieces + 1].tolist()
            return [self._tensor[start:stop] for start, stop in zip(starts, stops, strict=True)]
        assert self._packed.lengths is not None
        part = self._tensor[int(self._starts[low]) : int(self._starts[high])]
        views = part.split(self._packed.lengths[low:high].tolist())
        return [views[piece] for piece in (pieces - low).tolist()]

    def scalars(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of rows."""
        return self._packed.values[rows]

    def objects(self, rows: np.ndarray) -> list[Any]:
        """Objects of rows, a fresh copy for each."""
        pieces = self._pieces(rows)
        starts, stops = self._starts[pieces].tolist(), self._starts[pieces + 1].tolist()
        return [pickle.loads(self._packed.values[a:b].data) for a, b in zip(starts, stops, strict=True)]


class PayloadReader:
    """Reads claims, keeping the most recently used payloads open. Safe to use from several threads.

    `resolve(claim, ids)` fetches payloads, all that one `get` needs at once.
    """

    def __init__(self, spec: DockSpec, resolve: Callable[[Claim, list[int]], list[Payload]], capacity: int = 256):
        self._spec = spec
        self._resolve = resolve
        self._capacity = capacity
        self._open: OrderedDict[tuple[int, int], dict[str, _Column]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, claim: Claim, columns: Sequence[str]) -> dict[str, Any]:
        """See `TransferDock.get`."""
        for name in columns:
            if name not in claim.columns:
                raise DockError(
                    f"get: column '{name}' is not among the columns {claim.columns} of '{claim.consumer}'"
                )
        self.forget(lambda iteration: iteration < claim.oldest_iteration)
        wanted = {name: claim.locations[claim.columns.index(name)] for name in columns}
        ids = {int(key) for locations in wanted.values() for key in np.unique(locations >> 32)} - {_ABSENT}
        with self._lock:
            opened = self._opened(claim, sorted(ids))
        return {name: self._read(name, opened, locations) for name, locations in wanted.items()}

    def forget(self, gone: Callable[[int], bool]) -> None:
        """Close payloads of iterations for which `gone` holds, so that their memory can be freed."""
        with self._lock:
            self._open = OrderedDict((key, value) for key, value in self._open.items() if not gone(key[0]))

    def _opened(self, claim: Claim, ids: list[int]) -> dict[int, dict[str, _Column]]:
        absent = [key for key in ids if (claim.iteration, key) not in self._open]
        if absent:
            for key, payload in zip(absent, self._resolve(claim, absent), strict=True):
                self._open[claim.iteration, key] = {name: _Column(packed) for name, packed in payload.items()}
        result = {}
        for key in ids:
            self._open.move_to_end((claim.iteration, key))
            result[key] = self._open[claim.iteration, key]
        while len(self._open) > self._capacity:
            self._open.popitem(last=False)
        return result

    def _read(self, name: str, opened: Mapping[int, Mapping[str, _Column]], locations: np.ndarray) -> Any:
        payload_of, row_of = locations >> 32, locations & 0xFFFFFFFF
        column = self._spec.columns[name]
        if column.kind == "scalar":
            numbers = np.empty(len(locations), column.dtype)
            for key in np.unique(payload_of).tolist():
                numbers[payload_of == key] = opened[key][name].scalars(row_of[payload_of == key])
            return torch.from_numpy(numbers)
        values: list[Any] = []
        bounds = [0, *(np.flatnonzero(np.diff(payload_of)) + 1).tolist(), len(locations)]
        for start, stop in pairwise(bounds):  # runs of rows from one payload
            key, rows = int(payload_of[start]), row_of[start:stop]
            if key == _ABSENT:  # an optional column that is not there
                values += [None] * len(rows)
            else:
                packed = opened[key][name]
                values += packed.jagged(rows) if column.kind == "jagged" else packed.objects(rows)
        return values
