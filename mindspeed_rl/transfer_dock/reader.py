"""Reading a claim's rows out of payloads, without a copy where their kind allows it."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.payload import Payload, Values
from mindspeed_rl.transfer_dock.spec import ABSENT, Claim, ColumnSpec, DockSpec


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
    """A column of a payload made ready for reading rows."""

    def __init__(self, values: Values, bounds: np.ndarray, spec: ColumnSpec):
        self._values, self._pieces, self._bounds = values.flat, values.pieces, bounds
        if spec.kind == "jagged":
            self._flat = as_tensor(self._values)

    def run(self, rows: np.ndarray) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Rows of a jagged column, as `Jagged.joined` takes them."""
        return self._flat, self._bounds, self._pieces_of(rows)

    def scalars(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of rows."""
        return self._values[rows]

    def objects(self, rows: np.ndarray) -> list[Any]:
        """Objects of rows, a fresh copy for each."""
        pieces = self._pieces_of(rows)
        starts, stops = self._bounds[pieces].tolist(), self._bounds[pieces + 1].tolist()
        return [pickle.loads(self._values[a:b].data) for a, b in zip(starts, stops, strict=True)]

    def _pieces_of(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._pieces is None else self._pieces[rows]


class _Open:
    """A payload, fetched from `address`, with the columns that have been read so far."""

    def __init__(self, address: Any, payload: Payload, spec: DockSpec):
        self.address = address
        self._payload, self._spec = payload, spec
        self._columns: dict[str, _Column] = {}
        self._bounds: dict[int, np.ndarray] = {}  # by identity of the lengths, which columns share

    def __getitem__(self, name: str) -> _Column:
        if name not in self._columns:
            values = self._payload.columns[name]
            self._columns[name] = _Column(values, self._bounds_of(values.lengths), self._spec.columns[name])
        return self._columns[name]

    def _bounds_of(self, lengths: np.ndarray | None) -> np.ndarray:
        if lengths is None:
            return np.empty(0, np.int64)
        if id(lengths) not in self._bounds:
            self._bounds[id(lengths)] = np.concatenate(([0], np.cumsum(lengths)))
        return self._bounds[id(lengths)]


class PayloadReader:
    """Reads claims, keeping the most recently used payloads open. Safe to use from several threads.

    `resolve(claim, ids)` fetches payloads, all that one `get` needs at once.
    """

    def __init__(self, spec: DockSpec, resolve: Callable[[Claim, list[int]], list[Payload]], capacity: int = 256):
        self._spec = spec
        self._resolve = resolve
        self._capacity = capacity
        self._open: OrderedDict[tuple[int, int], _Open] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, claim: Claim, columns: Sequence[str]) -> dict[str, Any]:
        """See `TransferDock.get`."""
        for name in columns:
            if name not in claim.locations:
                raise DockError(
                    f"get: column '{name}' is not among the columns {claim.columns} of '{claim.consumer}'"
                )
        self.forget(lambda iteration: iteration < claim.oldest_iteration)
        wanted = {name: claim.locations[name] for name in columns}
        distinct = {id(locations): locations for locations in wanted.values()}
        runs = {key: _runs(locations) for key, locations in distinct.items()}
        ids = {payload for of_column in runs.values() for payload, _ in of_column} - {ABSENT}
        opened = self._opened(claim, sorted(ids))
        return {name: self._read(name, opened, runs[id(locations)]) for name, locations in wanted.items()}

    def forget(self, gone: Callable[[int], bool]) -> None:
        """Close payloads of iterations for which `gone` holds, so that their memory can be freed."""
        with self._lock:
            self._open = OrderedDict((key, value) for key, value in self._open.items() if not gone(key[0]))

    def _opened(self, claim: Claim, ids: list[int]) -> dict[int, _Open]:
        with self._lock:
            known = {key: self._open.get((claim.iteration, key)) for key in ids}
        # another dock's claim may have the same numbers
        result = {key: each for key, each in known.items() if each and each.address == claim.payloads[key]}
        absent = [key for key in ids if key not in result]
        if absent:  # without the lock: over a network it may take long
            payloads = self._resolve(claim, absent)
            for key, payload in zip(absent, payloads, strict=True):
                result[key] = _Open(claim.payloads[key], payload, self._spec)
        with self._lock:
            for key in ids:
                self._open[claim.iteration, key] = result[key]
                self._open.move_to_end((claim.iteration, key))
            while len(self._open) > self._capacity:
                self._open.popitem(last=False)
        return result

    def _read(self, name: str, opened: Mapping[int, _Open], runs: Sequence[tuple[int, np.ndarray]]) -> Any:
        column = self._spec.columns[name]
        if column.kind == "scalar":
            return torch.from_numpy(np.concatenate([opened[key][name].scalars(rows) for key, rows in runs]))
        if column.kind == "jagged" and all(key != ABSENT for key, _ in runs):
            return Jagged.joined([opened[key][name].run(rows) for key, rows in runs])
        values: list[Any] = []
        for key, rows in runs:  # objects, or optional values that are not all there
            if key == ABSENT:
                values += [None] * len(rows)
            elif column.kind == "jagged":
                values += Jagged.joined([opened[key][name].run(rows)])
            else:
                values += opened[key][name].objects(rows)
        return values


def _runs(locations: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The rows of a claim as (payload, rows in it), cut where the payload changes."""
    payload_of, row_of = locations >> 32, locations & 0xFFFFFFFF
    bounds = [0, *(np.flatnonzero(np.diff(payload_of)) + 1).tolist(), len(locations)]
    return [(int(payload_of[start]), row_of[start:stop]) for start, stop in pairwise(bounds)]
