"""The two ways to hand out work: in a fixed order, or in order of readiness.

Both deal in *units*: positions 0, 1, … in a consumer's order, each one row, or one whole group for a grouped
consumer. `missing[unit]` counts the values a unit still lacks; 0 means ready. Handing out costs what the units moved
cost, however large the iteration is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

DealOut = Callable[[np.ndarray], Sequence[Sequence[int]]]
"""Units of a block, all ready -> indices into them for each share, ascending, equally many."""


NO_UNITS = np.empty(0, np.int64)


@lru_cache(maxsize=16)  # consumers of one dock differ little in this, and its iterations not at all
def owners(units: int, block: int, shares: int) -> np.ndarray:
    """Share of each unit, [units] int16: share d owns the d-th contiguous 1/D of every block of `block` units.

    Read-only: it is shared by all who ask for the same.
    """
    position = np.arange(units, dtype=np.int64)
    offset = position % block
    length = np.minimum(block, units - (position - offset))
    # Share d owns offsets floor(d·length/D) <= o < floor((d+1)·length/D); solved for d:
    owner = (((offset + 1) * shares - 1) // length).astype(np.int16)
    owner.flags.writeable = False
    return owner


@lru_cache(maxsize=16)
def _by_share(units: int, block: int, shares: int) -> list[np.ndarray]:
    """Units of each share, ascending, as `owners` has them; read-only."""
    result = _split(owners(units, block, shares), shares)
    for array in result:
        array.flags.writeable = False
    return result


def _split(owner: np.ndarray, shares: int) -> list[np.ndarray]:
    by_share = np.argsort(owner, kind="stable").astype(np.int32)
    return np.split(by_share, np.cumsum(np.bincount(owner, minlength=shares))[:-1])


class WorkQueue(Protocol):
    """Units of one consumer in one iteration that are not handed out."""

    def became_ready(self, units: np.ndarray) -> None:
        """These units (at least one) lack nothing any more."""

    def take(self, share: int, count: int) -> np.ndarray:
        """The next `count` units (fewer at the end of a share or block), or none while they are not all ready."""

    def upcoming(self, share: int, count: int) -> list[int]:
        """Units that `take` would hand out next, ready or not, as far as that is known."""

    def give_back(self, share: int, units: np.ndarray) -> None:
        """Units handed out before come back and go first."""

    def remaining(self, share: int) -> int:
        """Units of the share that are not handed out."""

    def skip(self, share: int, units: np.ndarray) -> None:
        """On a fresh queue: these units (ascending) have been handed out before."""


class _Sequence:
    """One share's units in order. Indices below `cursor` are handed out, except those in `returned`."""

    def __init__(self, units: np.ndarray):
        self.units = units
        self.cursor = 0
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
    """Strict order: a share gets its units one after the other, and waits for the next even if later are ready.

    With `deal_out`, a block's units are shared out once all of them are ready, and handed out only then. The shares'
    sizes stay those of `owners`, so that nothing but who owns what changes.
    """

    def __init__(
        self,
        missing: np.ndarray,
        block: int,
        shares: int,
        deal_out: DealOut | None = None,
        owner: np.ndarray | None = None,
    ):
        self._missing = missing
        self._block = block
        layout = len(missing), block, shares
        # [units] int16, share of each unit
        self.owner = owners(*layout) if owner is None else owner
        by_share = _by_share(*layout) if owner is None else _split(owner, shares)
        if deal_out is not None:  # which writes in them
            self.owner, by_share = self.owner.copy(), [units.copy() for units in by_share]
        self.dealt = None if deal_out is None else np.zeros(-(-len(missing) // block), bool)
        self._deal_out = deal_out
        self._shares = [_Sequence(units) for units in by_share]

    def became_ready(self, units: np.ndarray) -> None:
        """Nothing to do: `take` looks at what is missing."""

    def _is_dealt(self, block: int) -> bool:
        """Whether the block's units have their shares; deals them out if they can be.

        Only when the first of them is asked for: `deal_out` is not ours and may raise, which must not undo a put.
        """
        if self.dealt is None or self.dealt[block]:
            return True
        members = slice(block * self._block, (block + 1) * self._block)
        if self._missing[members].any():
            return False
        self._deal(block, members)
        return True

    def _deal(self, block: int, members: slice) -> None:
        assert self._deal_out is not None
        assert self.dealt is not None
        units = np.arange(len(self._missing), dtype=np.int32)[members]
        parts = self._deal_out(units)
        for share, (sequence, part) in enumerate(zip(self._shares, parts, strict=True)):
            self.owner[units[part]] = share
            first = int(np.searchsorted(sequence.units, units[0]))
            sequence.units[first : first + len(part)] = units[part]
        self.dealt[block] = True

    def take(self, share: int, count: int) -> np.ndarray:
        sequence = self._shares[share]
        back, fresh = sequence.next_indices(count, self._block)
        first = sequence.units[back[0] if back else sequence.cursor] if back or fresh else None
        if first is not None and not self._is_dealt(int(first) // self._block):
            return NO_UNITS
        units = sequence.units[sequence.cursor : sequence.cursor + fresh]
        if back:
            units = np.concatenate((sequence.units[back], units))
        if not len(units) or self._missing[units].any():
            return NO_UNITS
        for _ in back:
            heapq.heappop(sequence.returned)
        sequence.cursor += fresh
        return units.astype(np.int64)

    def upcoming(self, share: int, count: int) -> list[int]:
        sequence = self._shares[share]
        back, fresh = sequence.next_indices(count, self._block)
        units = sequence.units[back + list(range(sequence.cursor, sequence.cursor + fresh))]
        if len(units) and self.dealt is not None and not self.dealt[units[0] // self._block]:
            start = units[0] // self._block * self._block  # waits for all of its block
            return list(range(start, min(start + self._block, len(self._missing))))
        return units.tolist()

    def give_back(self, share: int, units: np.ndarray) -> None:
        sequence = self._shares[share]
        for index in np.searchsorted(sequence.units, units).tolist():
            heapq.heappush(sequence.returned, index)

    def remaining(self, share: int) -> int:
        sequence = self._shares[share]
        return len(sequence.units) - sequence.cursor + len(sequence.returned)

    def skip(self, share: int, units: np.ndarray) -> None:
        if not len(units):
            return
        sequence = self._shares[share]
        taken = np.searchsorted(sequence.units, units)
        sequence.cursor = int(taken[-1]) + 1
        sequence.returned = np.setdiff1d(np.arange(sequence.cursor), taken).tolist()


class ReadinessQueue:
    """First ready, first out: any share takes any ready unit until it has had its number of units."""

    def __init__(self, missing: np.ndarray, shares: int, owner: np.ndarray):
        self._missing = missing
        self._ready: deque[int] = deque()
        self._left = np.bincount(owner, minlength=shares).tolist()

    def became_ready(self, units: np.ndarray) -> None:
        self._ready.extend(units.tolist())

    def take(self, share: int, count: int) -> np.ndarray:
        count = min(count, self._left[share])
        if len(self._ready) < count:
            return NO_UNITS
        self._left[share] -= count
        return np.array([self._ready.popleft() for _ in range(count)], np.int64)

    def upcoming(self, share: int, count: int) -> list[int]:
        return np.flatnonzero(self._missing).tolist() if self._left[share] else []

    def give_back(self, share: int, units: np.ndarray) -> None:
        self._ready.extendleft(units[::-1].tolist())
        self._left[share] += len(units)

    def remaining(self, share: int) -> int:
        return self._left[share]

    def skip(self, share: int, units: np.ndarray) -> None:
        taken = set(units.tolist())
        self._ready = deque(unit for unit in self._ready if unit not in taken)
        self._left[share] -= len(taken)
