"""Payloads: the values of one put, packed; and reading a claim's rows out of them.

A payload maps each column to a `Packed` array, so that it is stored as a few large buffers, however many rows it
holds. Objects are pickled row by row: a reader unpickles only the rows it asks for, and gets objects of its own.
"""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.spec import Claim, ColumnSpec, DockSpec

_TORCH_DTYPES = {"int64": torch.int64, "float32": torch.float32}


@dataclass(frozen=True)
class Packed:
    """One column of a payload. Row i is `values[starts[i] : starts[i] + lengths[i]]`, or `values[i]` for scalars.

    Rows that were given the same tensor share their range. Objects are pickles in `values`, uint8.
    """

    values: np.ndarray
    starts: np.ndarray | None = None
    lengths: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all three arrays."""
        return sum(array.nbytes for array in (self.values, self.starts, self.lengths) if array is not None)


Payload = dict[str, Packed]


def pack(spec: DockSpec, rows: np.ndarray, columns: Mapping[str, Sequence[Any]]) -> tuple[Payload, int]:
    """Check and pack the values of a put; returns the payload and its bytes. `DockError` names column and row."""
    if not columns:
        raise DockError("put: no columns given")
    payload = {}
    for name, values in columns.items():
        if name not in spec.columns:
            raise DockError(f"put: unknown column '{name}'; there are {list(spec.columns)}")
        if len(values) != len(rows):
            raise DockError(f"put: column '{name}' has {len(values)} values for {len(rows)} rows")
        payload[name] = _PACKERS[spec.columns[name].kind](name, spec.columns[name], rows, values)
    return payload, sum(packed.nbytes for packed in payload.values())


def _pack_jagged(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> Packed:
    expected = _TORCH_DTYPES[column.dtype]
    for row, value in zip(rows, values, strict=True):
        if not isinstance(value, torch.Tensor) or value.ndim != 1 or value.dtype != expected:
            raise DockError(
                f"put: column '{name}', row {row}: expected a 1-D {column.dtype} tensor, got {_kind(value)}"
            )
    # All tensors are alive here, so equal memory means the same values.
    keys = [(value.device, value.data_ptr(), len(value), value.stride()) if len(value) else None for value in values]
    return _join(keys, lambda index: values[index].detach().cpu().numpy(), np.dtype(column.dtype))


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


def _pack_object(name: str, column: ColumnSpec, rows: np.ndarray, values: Sequence[Any]) -> Packed:
    pickles: dict[int, np.ndarray] = {}
    for row, value in zip(rows, values, strict=True):
        if id(value) not in pickles:
            try:
                pickles[id(value)] = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise DockError(
                    f"put: column '{name}', row {row}: {_kind(value)} cannot be pickled: {error}"
                ) from error
    return _join([id(value) for value in values], lambda index: pickles[id(values[index])], np.dtype(np.uint8))


_PACKERS = {"jagged": _pack_jagged, "scalar": _pack_scalar, "object": _pack_object}


def _join(keys: Sequence[Hashable], piece: Callable[[int], np.ndarray], dtype: np.dtype) -> Packed:
    """Concatenate one piece for each different key; equal keys share one range."""
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    pieces = {key: piece(index) for key, index in first.items()}
    ranges, start = {}, 0
    for key, array in pieces.items():
        ranges[key] = (start, len(array))
        start += len(array)
    starts, lengths = np.array([ranges[key] for key in keys], np.int64).T
    return Packed(np.concatenate(list(pieces.values()), dtype=dtype), starts.copy(), lengths.copy())


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
    def _ranges(self) -> list[tuple[int, int]]:
        assert self._packed.starts is not None
        assert self._packed.lengths is not None
        return list(zip(self._packed.starts.tolist(), self._packed.lengths.tolist(), strict=True))

    def jagged(self, row: int) -> torch.Tensor:
        """Values of one row, a view."""
        return self._tensor.narrow(0, *self._ranges[row])

    def scalars(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of several rows."""
        return self._packed.values[rows]

    def object(self, row: int) -> Any:
        """One row's object, a fresh copy."""
        start, length = self._ranges[row]
        return pickle.loads(self._packed.values[start : start + length].data)


class PayloadReader:
    """Reads claims, keeping the most recently used payloads open. Safe to use from several threads.

    `resolve(iteration, addresses)` fetches payloads, all that one `get` needs at once.
    """

    def __init__(self, spec: DockSpec, resolve: Callable[[int, list[Any]], list[Payload]], capacity: int = 256):
        self._spec = spec
        self._resolve = resolve
        self._capacity = capacity
        self._open: OrderedDict[tuple[int, int], dict[str, _Column]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, claim: Claim, columns: Sequence[str]) -> dict[str, Any]:
        """See `TransferDock.get`."""
        for name in columns:
            if name not in claim.columns:
                raise DockError(f"get: column '{name}' is not among the needs {claim.columns} of '{claim.consumer}'")
        self.forget(lambda iteration: iteration < claim.oldest_iteration)
        wanted = {name: claim.locations[claim.columns.index(name)] for name in columns}
        ids = {int(key) for locations in wanted.values() for key in np.unique(locations >> 32)}
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
            payloads = self._resolve(claim.iteration, [claim.payloads[key] for key in absent])
            for key, payload in zip(absent, payloads, strict=True):
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
        pairs: Iterable[tuple[int, int]] = zip(payload_of.tolist(), row_of.tolist(), strict=True)
        if column.kind == "jagged":
            return [opened[key][name].jagged(row) for key, row in pairs]
        return [opened[key][name].object(row) for key, row in pairs]
