"""The two ways to hand out work: in a fixed order, or in order of readiness.

Both deal in *units*: positions 0, 1, … in a consumer's order, each one row, or one whole group for a grouped
consumer. `missing[unit]` counts the values a unit still lacks; 0 means ready, and a ready unit stays ready. Handing
out costs (amortised) what the units moved cost, however large the iteration is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


def split_shares(units: int, block: int, shares: int) -> list[np.ndarray]:
    """Positions owned by each share, ascending: the d-th contiguous 1/D of every block of `block` units."""
    position = np.arange(units, dtype=np.int64)
    offset = position % block
    length = np.minimum(block, units - (position - offset))
    # Share d owns offsets floor(d·length/D) <= o < floor((d+1)·length/D); solved for d:
    share = ((offset + 1) * shares - 1) // length
    by_share = np.argsort(share, kind="stable").astype(np.int32)
    bounds = np.cumsum(np.bincount(share, minlength=shares))[:-1]
    return np.split(by_share, bounds)


class WorkQueue(Protocol):
    """Units of one consumer in one iteration that are not handed out."""

    def became_ready(self, units: Iterable[int]) -> None:
        """These units lack nothing any more."""

    def take(self, share: int, count: int) -> list[int]:
        """The next `count` units (fewer at the end of a share or block), or none while they are not all ready."""

    def upcoming(self, share: int, count: int) -> list[int]:
        """Units that `take` would hand out next, ready or not, as far as that is known."""

    def give_back(self, share: int, units: Sequence[int]) -> None:
        """Units handed out before come back and go first."""

    def remaining(self, share: int) -> int:
        """Units of the share that are not handed out."""

    def skip(self, share: int, units: np.ndarray) -> None:
        """On a fresh queue: these units (ascending) were finished before it was restored."""


class _Sequence:
    """One share's units in order. Indices below `cursor` are handed out, except those in `returned`."""

    def __init__(self, units: np.ndarray):
        self.units = units
        self.cursor = 0
        self.frontier = 0  # all indices below are known to be ready
        self.returned: list[int] = []  # heap of indices

    def next_indices(self, count: int, block: int) -> tuple[list[int], int]:
        """Returned indices and number of fresh ones that come next, at most `count`, all in one block."""
        first = self.returned[0] if self.returned else self.cursor
        if first == len(self.units):
            return [], 0
        end = int(np.searchsorted(self.units, (self.units[first] // block + 1) * block))
        back = [index for index in heapq.nsmallest(count, self.returned) if index < end]
        return back, min(count - len(back), max(0, end - self.cursor))


class OrderedQueue:
    """Strict order: a share gets its units one after the other, and waits for the next even if later are ready."""

    def __init__(self, missing: np.ndarray, block: int, shares: int):
        self._missing = missing
        self._block = block
        self._shares = [_Sequence(units) for units in split_shares(len(missing), block, shares)]

    def became_ready(self, units: Iterable[int]) -> None:
        pass  # `take` looks for itself, from the frontier on

    def take(self, share: int, count: int) -> list[int]:
        sequence = self._shares[share]
        back, fresh = sequence.next_indices(count, self._block)
        stop = sequence.cursor + fresh
        while sequence.frontier < stop and not self._missing[sequence.units[sequence.frontier]]:
            sequence.frontier += 1
        if sequence.frontier < stop:
            return []
        for _ in back:
            heapq.heappop(sequence.returned)
        indices = back + list(range(sequence.cursor, stop))
        sequence.cursor = stop
        return sequence.units[indices].tolist()

    def upcoming(self, share: int, count: int) -> list[int]:
        sequence = self._shares[share]
        back, fresh = sequence.next_indices(count, self._block)
        return sequence.units[back + list(range(sequence.cursor, sequence.cursor + fresh))].tolist()

    def give_back(self, share: int, units: Sequence[int]) -> None:
        sequence = self._shares[share]
        for index in np.searchsorted(sequence.units, np.asarray(units)).tolist():
            heapq.heappush(sequence.returned, index)

    def remaining(self, share: int) -> int:
        sequence = self._shares[share]
        return len(sequence.units) - sequence.cursor + len(sequence.returned)

    def skip(self, share: int, units: np.ndarray) -> None:
        if not len(units):
            return
        sequence = self._shares[share]
        finished = np.searchsorted(sequence.units, units)
        sequence.cursor = sequence.frontier = int(finished[-1]) + 1
        # Everything below the cursor was handed out once, so it is ready: what is unfinished comes back.
        sequence.returned = np.setdiff1d(np.arange(sequence.cursor), finished).tolist()


class ReadinessQueue:
    """First ready, first out: any share takes any ready unit until it has had its number of units."""

    def __init__(self, missing: np.ndarray, block: int, shares: int):
        self._missing = missing
        self._ready: deque[int] = deque()
        self._left = [len(units) for units in split_shares(len(missing), block, shares)]

    def became_ready(self, units: Iterable[int]) -> None:
        self._ready.extend(units)

    def take(self, share: int, count: int) -> list[int]:
        count = min(count, self._left[share])
        if len(self._ready) < count:
            return []
        self._left[share] -= count
        return [self._ready.popleft() for _ in range(count)]

    def upcoming(self, share: int, count: int) -> list[int]:
        return np.flatnonzero(self._missing).tolist() if self._left[share] else []

    def give_back(self, share: int, units: Sequence[int]) -> None:
        self._ready.extendleft(reversed(units))
        self._left[share] += len(units)

    def remaining(self, share: int) -> int:
        return self._left[share]

    def skip(self, share: int, units: np.ndarray) -> None:
        finished = set(units.tolist())
        self._ready = deque(unit for unit in self._ready if unit not in finished)
        self._left[share] -= len(finished)
