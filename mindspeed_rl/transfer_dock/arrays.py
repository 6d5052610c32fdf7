"""Row numbers as numpy arrays, handled fast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_rl.common.errors import DockError

_MANY = 256  # with fewer, to look takes longer than it saves


def as_rows(rows: Sequence[int]) -> np.ndarray:
    """Row numbers as int64 [n]; `DockError` unless they are one or more different integers."""
    try:
        array = np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else np.asarray(rows)
    except ValueError as error:  # lists of different lengths
        raise DockError(f"rows = {rows!r:.80}: expected one or more row numbers") from error
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise DockError(f"rows = {rows!r:.80}: expected one or more row numbers")
    array = array.astype(np.int64)
    if (array[1:] <= array[:-1]).any() and len(np.unique(array)) != array.size:
        raise DockError(f"rows = {rows!r:.80}: a row occurs twice")
    return array


def as_rejected(rows: Sequence[int] | None, columns: object) -> np.ndarray | None:
    """Rows that an acknowledgement with these results rejects, int64 [0 or more]; `DockError` without results."""
    if rows is None:
        return None
    if not columns:
        raise DockError("ack: groups are judged without results, with the last of which they are selected")
    return as_rows(rows) if len(rows) else np.empty(0, np.int64)


def as_index(numbers: np.ndarray) -> np.ndarray | slice:
    """An index for these numbers: a slice where many follow each other, as numpy is far faster with those."""
    size = len(numbers)
    if size >= _MANY and numbers[-1] - numbers[0] == size - 1 and (numbers[1:] > numbers[:-1]).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def counted(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different numbers (0 or more) in the order in which they occur first, and how often each does."""
    if (numbers[1:] >= numbers[:-1]).all():  # ascending: faster than to sort again
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        return numbers[starts], np.diff(starts, append=len(numbers))
    different, first, counts = np.unique(numbers, return_index=True, return_counts=True)
    order = np.argsort(first)
    return different[order], counts[order]


def members(groups: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """Numbers of all members of groups of `size` neighbours, group by group, int64."""
    numbers = np.asarray(groups, np.int64)
    return numbers if size == 1 else (numbers[:, None] * size + np.arange(size)).ravel()


class Shared:
    """One array for equal ones: then they are pickled once, and what is derived from them is computed once."""

    def __init__(self) -> None:
        self._known: dict[bytes, np.ndarray] = {}

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """An equal int64 array that was given before, else this one."""
        return self._known.setdefault(array.tobytes(), array)
