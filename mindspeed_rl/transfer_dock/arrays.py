"""Row numbers as numpy arrays, handled fast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def as_index(numbers: np.ndarray) -> np.ndarray | slice:
    """An index for these numbers: a slice where they follow each other, as numpy is far faster with those."""
    size = len(numbers)
    if size and numbers[-1] - numbers[0] == size - 1 and (numbers[1:] > numbers[:-1]).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def members(groups: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """Numbers of all members of groups of `size` neighbours, group by group, int64."""
    numbers = np.asarray(groups, np.int64)
    return numbers if size == 1 else (numbers[:, None] * size + np.arange(size)).ravel()


class Shared:
    """One array for equal ones: then they are pickled once, and what is derived from them is computed once."""

    def __init__(self) -> None:
        self._known: list[np.ndarray] = []

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """An equal array that was given before, else this one."""
        for known in self._known:
            if known is array or np.array_equal(known, array):
                return known
        self._known.append(array)
        return array
