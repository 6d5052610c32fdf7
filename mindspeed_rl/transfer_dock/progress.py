"""One consumer's way through one iteration: which rows are ready, handed out, acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.arrays import as_index, counted, members
from mindspeed_rl.transfer_dock.queues import NO_UNITS, DealOut, OrderedQueue, ReadinessQueue, WorkQueue, owners
from mindspeed_rl.transfer_dock.spec import ConsumerSpec

_UNBOUND = -1


class Progress:
    """Translates rows to the units (rows or groups, in the consumer's order) that a `WorkQueue` deals in.

    Args:
        name, spec: the consumer.
        rows: of the iteration.
        group: rows of a prompt.
        block_rows: rows of a block.
        order: the rows in the order in which they are handed out; None: ascending.
        keep_order: hand out in that order, not in order of readiness.
        selected: rows that will be handed out, if not all: `bind` says which, step by step. `order` is then of
            0 … selected − 1, the numbers in which they are bound.
        deal_out: shares out the rows of a block; for consumers with `balance`.
    """

    def __init__(
        self,
        name: str,
        spec: ConsumerSpec,
        rows: int,
        group: int,
        block_rows: int,
        order: Sequence[int] | None,
        keep_order: bool,
        selected: int | None = None,
        deal_out: DealOut | None = None,
    ):
        self.name, self.spec = name, spec
        self.unit_rows = group if spec.grouped else 1
        self._arguments = (rows, group, block_rows, order, keep_order, selected, deal_out)
        if block_rows % self.unit_rows:
            raise DockError(
                f"block_rows = {block_rows}: grouped consumer '{name}' needs a multiple of n_samples = {group}"
            )
        if order is not None and not keep_order:
            raise DockError(f"an order for consumer '{name}' needs guarantee_order: true")
        slots = rows if selected is None else selected
        if deal_out is not None and (block_rows % spec.shares or slots % block_rows):
            raise DockError(
                f"balanced consumer '{name}' needs block_rows = {block_rows} to be a multiple of its {spec.shares} "
                f"shares, and the {slots} rows of an iteration to be a multiple of block_rows"
            )
        order_array = None if order is None else _permutation(name, order, slots, self.unit_rows)
        # place in the order of the n-th bound row; None: n
        self._places = None if order_array is None else np.argsort(order_array).astype(np.int32)
        self.order = order_array if selected is None else np.full(slots, _UNBOUND, np.int32)
        self._positions: np.ndarray | None = None  # of each row in `order`
        if selected is not None:
            self._positions = np.full(rows, _UNBOUND, np.int32)
        elif self._places is not None:
            self._positions = self._places
        self.bound = rows if selected is None else 0
        units = slots // self.unit_rows
        self.missing = np.full(units, self.unit_rows * len(spec.needs), np.int32)  # values each unit lacks
        self.acked_by = np.zeros(units, np.int16)  # share + 1, or 0
        block = block_rows // self.unit_rows
        self.queue: WorkQueue = (
            OrderedQueue(self.missing, block, spec.shares, self._dealing(deal_out))
            if keep_order
            else ReadinessQueue(self.missing, spec.shares, owners(units, block, spec.shares))
        )
        self._unfinished = [self.queue.remaining(share) for share in range(spec.shares)]
        self.closed = False  # nothing is handed out any more, whatever is left

    def _dealing(self, deal_out: DealOut | None) -> DealOut | None:
        """Queues deal in units, `deal_out` in rows: the same but for the order."""
        return None if deal_out is None else lambda units: deal_out(self.rows_of(units))

    @property
    def unbound(self) -> int:
        """Rows of which it is not known yet which they are."""
        return len(self.missing) * self.unit_rows - self.bound

    @property
    def owner(self) -> np.ndarray:
        """[units] share that owns each unit; without a guarantee of order, one that fits the shares' sizes."""
        if isinstance(self.queue, OrderedQueue):
            return self.queue.owner
        return owners(len(self.missing), self._arguments[2] // self.unit_rows, self.spec.shares)

    def units_of(self, rows: np.ndarray) -> np.ndarray:
        """Unit of each row; rows that are not bound are left out."""
        if self._positions is None:
            return rows if self.unit_rows == 1 else rows // self.unit_rows
        positions = self._positions[rows]
        return positions[positions >= 0] // self.unit_rows

    def rows_of(self, units: Sequence[int] | np.ndarray) -> np.ndarray:
        """All rows of the units, in the consumer's order, as far as they are bound."""
        positions = members(units, self.unit_rows)
        if self.order is None:
            return positions
        rows = self.order[as_index(positions)]
        return rows[rows >= 0]

    def arrived(self, rows: np.ndarray, values: int) -> bool:
        """Each row got `values` of the needed columns; True when a unit became ready."""
        units = self.units_of(rows)
        if self.unit_rows == 1:
            return self._subtract(units, values)
        units, counts = counted(units)
        return self._subtract(units, values * counts)

    def _subtract(self, units: np.ndarray, values: int | np.ndarray) -> bool:
        """These units, all different, got so many values."""
        index = as_index(units)
        self.missing[index] -= values
        # Units that are done may get values again, which others of their group, or other consumers, had lost.
        ready = units[(self.missing[index] == 0) & (self.acked_by[index] == 0)]
        if ready.size:
            self.queue.became_ready(ready)
        return bool(ready.size)

    def bind(self, rows: np.ndarray, present: np.ndarray) -> bool:
        """These rows come next in a selection; `present`: how many of the needed values each has already."""
        assert self.order is not None
        assert self._positions is not None
        numbers = np.arange(self.bound, self.bound + len(rows))
        places = numbers if self._places is None else self._places[numbers]
        self.order[places] = rows
        self._positions[rows] = places
        self.bound += len(rows)
        values = present.reshape(-1, self.unit_rows).sum(axis=1, dtype=np.int32)  # selections are of whole groups
        return self._subtract(places[:: self.unit_rows] // self.unit_rows, values)

    def extend(self, more: int) -> None:
        """The iteration has more rows from now on, of which as many are selected as before."""
        assert self._positions is not None
        self._positions = np.pad(self._positions, (0, more), constant_values=_UNBOUND)
        self._arguments = (self._arguments[0] + more, *self._arguments[1:])

    def take(self, share: int, count: int) -> np.ndarray:
        """Units of up to `count` rows; see `WorkQueue.take`."""
        return NO_UNITS if self.closed else self.queue.take(share, count // self.unit_rows)

    def acknowledged(self, share: int, units: np.ndarray) -> None:
        """The units are done for good."""
        self.acked_by[as_index(units)] = share + 1
        self._unfinished[share] -= len(units)

    def finished(self, share: int) -> bool:
        """All rows of the share are acknowledged, or nobody wants the others."""
        return self.closed or self._unfinished[share] == 0

    def done_rows(self, rows: int) -> np.ndarray:
        """[rows] bool: acknowledged."""
        done = np.zeros(rows, bool)
        done[self.rows_of(np.flatnonzero(self.acked_by))] = True
        return done

    def state(self) -> dict[str, Any]:
        """What `rebuild` needs beside the columns' locations; plain."""
        dealt = self._dealt
        balanced = None if dealt is None else (self.queue.owner.copy(), dealt.copy())  # type: ignore[attr-defined]
        binding = None if self._arguments[5] is None else self._bound_rows()
        state = {"acked_by": self.acked_by.copy(), "balanced": balanced, "bound": binding}
        return {**state, "shares": self.spec.shares}

    @property
    def _dealt(self) -> np.ndarray | None:
        """[blocks] whether a block has been shared out; None: all are, in contiguous parts."""
        return self.queue.dealt if isinstance(self.queue, OrderedQueue) else None

    def _bound_rows(self) -> np.ndarray:
        assert self.order is not None
        in_place = self.order if self._places is None else self.order[self._places]
        return in_place[: self.bound].copy()

    def rebuild(self, state: dict[str, Any], locations: np.ndarray, out: dict[int, list[int]]) -> Progress:
        """A fresh object with this one's arguments, `state`, and the needed columns' locations [columns, rows].

        The state may be of other shares. What they have done then counts for those that would do it now.

        out: units that stay handed out, by share.
        """
        acked_by, balanced = state["acked_by"], state["balanced"]
        if state.get("shares", self.spec.shares) != self.spec.shares:
            acked_by = np.where(acked_by > 0, self.owner + 1, 0)
            dealt = self._dealt
            balanced = None if dealt is None else (self.owner, np.ones_like(dealt))  # as if dealt in equal parts
        rows, group, block_rows, order, keep_order, selected, deal_out = self._arguments
        fresh = Progress(self.name, self.spec, rows, group, block_rows, order, keep_order, selected, deal_out)
        taken = np.zeros(len(fresh.missing), bool)
        for units in out.values():
            taken[units] = True
        taken |= acked_by > 0
        if balanced is not None:
            owner, dealt = balanced
            fresh._restore_balance(owner, dealt, taken)
        if state["bound"] is not None:
            fresh.bind(state["bound"], np.zeros(len(state["bound"]), np.int32))
        fresh._mark_ready(locations)
        for share in range(self.spec.shares):
            acked = np.flatnonzero(acked_by == share + 1)
            fresh.acknowledged(share, acked)
            fresh.queue.skip(share, np.union1d(acked, np.array(out.get(share, []), np.int64)))
        return fresh

    def _restore_balance(self, owner: np.ndarray, dealt: np.ndarray, taken: np.ndarray) -> None:
        """Blocks of which something was handed out stay as they were dealt; others may get other lengths yet."""
        block = self._arguments[2]
        assert isinstance(self.queue, OrderedQueue)
        kept = dealt & taken.reshape(-1, block).any(axis=1)
        owner = np.where(np.repeat(kept, block), owner, self.queue.owner)
        queue = OrderedQueue(self.missing, block, self.spec.shares, self._dealing(self._arguments[6]), owner)
        assert queue.dealt is not None
        queue.dealt[:] = kept
        self.queue = queue

    def _mark_ready(self, locations: np.ndarray) -> None:
        rows = self.rows_of(np.arange(len(self.missing)))
        positions = np.arange(len(rows)) if self._positions is None else self._positions[rows]
        units = positions // self.unit_rows
        present = locations[:, rows]
        np.subtract.at(self.missing, units, (present > 0).sum(axis=0).astype(np.int32))
        # Locations grow with every put: a unit became ready with the largest of its locations.
        became_ready = np.zeros(len(self.missing), np.int64)
        np.maximum.at(became_ready, units, present.max(axis=0))
        ready = np.flatnonzero(self.missing == 0)
        if ready.size:
            self.queue.became_ready(ready[np.argsort(became_ready[ready], kind="stable")])


def _permutation(name: str, order: Sequence[int], rows: int, unit_rows: int) -> np.ndarray:
    """The order as an array; `DockError` unless it is a permutation of the rows that keeps units together."""
    array = np.asarray(order)
    if array.shape != (rows,) or array.dtype.kind != "i" or not np.array_equal(np.sort(array), np.arange(rows)):
        raise DockError(f"the order for consumer '{name}' is not a permutation of the iteration's {rows} rows")
    groups = array.reshape(-1, unit_rows) // unit_rows
    if (groups != groups[:, :1]).any():
        raise DockError(f"the order for grouped consumer '{name}' tears a group of {unit_rows} rows apart")
    return array.astype(np.int32)
