"""One consumer's way through one iteration: which rows are ready, handed out, acknowledged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.queues import OrderedQueue, ReadinessQueue, WorkQueue
from mindspeed_rl.transfer_dock.spec import ConsumerSpec


class Progress:
    """Translates rows to the units (rows or groups, in the consumer's order) that a `WorkQueue` deals in."""

    def __init__(
        self,
        name: str,
        spec: ConsumerSpec,
        rows: int,
        group: int,
        block_rows: int,
        order: Sequence[int] | None,
        keep_order: bool,
    ):
        self.name, self.spec = name, spec
        self.unit_rows = group if spec.grouped else 1
        if block_rows % self.unit_rows:
            raise DockError(
                f"block_rows = {block_rows}: grouped consumer '{name}' needs a multiple of n_samples = {group}"
            )
        if order is not None and not keep_order:
            raise DockError(f"an order for consumer '{name}' needs guarantee_order: true")
        self.order = None if order is None else _permutation(name, order, rows, self.unit_rows)
        self._position = None if self.order is None else np.argsort(self.order).astype(np.int32)
        units = rows // self.unit_rows
        self.missing = np.full(units, self.unit_rows * len(spec.needs), np.int32)  # values each unit lacks
        queue = OrderedQueue if keep_order else ReadinessQueue
        self.queue: WorkQueue = queue(self.missing, block_rows // self.unit_rows, spec.shares)
        self.acked_by = np.zeros(units, np.int16)  # share + 1, or 0
        self._unfinished = [self.queue.remaining(share) for share in range(spec.shares)]

    def units_of(self, rows: np.ndarray) -> np.ndarray:
        """Unit of each row."""
        return (rows if self._position is None else self._position[rows]) // self.unit_rows

    def rows_of(self, units: Sequence[int]) -> np.ndarray:
        """All rows of the units, in the consumer's order."""
        positions = np.asarray(units, np.int64)
        if self.unit_rows > 1:
            positions = (positions[:, None] * self.unit_rows + np.arange(self.unit_rows)).ravel()
        return positions if self.order is None else self.order[positions]

    def arrived(self, rows: np.ndarray, values: int) -> bool:
        """Each row got `values` of the needed columns; True when a unit became ready."""
        units = self.units_of(rows)
        if self.unit_rows > 1:
            np.subtract.at(self.missing, units, values)  # a unit may occur several times
        else:
            self.missing[units] -= values
        ready = dict.fromkeys(units[self.missing[units] == 0].tolist())
        self.queue.became_ready(ready)
        return bool(ready)

    def take(self, share: int, count: int) -> list[int]:
        """Units of up to `count` rows; see `WorkQueue.take`."""
        return self.queue.take(share, count // self.unit_rows)

    def acknowledged(self, share: int, units: Sequence[int]) -> None:
        """The units are done for good."""
        self.acked_by[units] = share + 1
        self._unfinished[share] -= len(units)

    def finished(self, share: int) -> bool:
        """All rows of the share are acknowledged."""
        return self._unfinished[share] == 0

    def rebuild(self, locations: np.ndarray, acked_by: np.ndarray) -> None:
        """Restore a fresh object from the needed columns' locations [columns, rows] and the acknowledgements."""
        ordered = locations if self.order is None else locations[:, self.order]
        by_unit = ordered.reshape(len(locations), len(self.missing), self.unit_rows)
        self.missing -= (by_unit > 0).sum(axis=(0, 2), dtype=np.int32)
        ready = np.flatnonzero(self.missing == 0)
        # Locations grow with every put: a unit became ready with the largest of its locations.
        became_ready = by_unit.max(axis=(0, 2))[ready]
        self.queue.became_ready(ready[np.argsort(became_ready, kind="stable")].tolist())
        for share in range(self.spec.shares):
            units = np.flatnonzero(acked_by == share + 1)
            self.queue.skip(share, units)
            self.acknowledged(share, units.tolist())


def _permutation(name: str, order: Sequence[int], rows: int, unit_rows: int) -> np.ndarray:
    """The order as an array; `DockError` unless it is a permutation of the rows that keeps units together."""
    array = np.asarray(order)
    if array.shape != (rows,) or array.dtype.kind != "i" or not np.array_equal(np.sort(array), np.arange(rows)):
        raise DockError(f"the order for consumer '{name}' is not a permutation of the iteration's {rows} rows")
    groups = array.reshape(-1, unit_rows) // unit_rows
    if (groups != groups[:, :1]).any():
        raise DockError(f"the order for grouped consumer '{name}' tears a group of {unit_rows} rows apart")
    return array.astype(np.int32)
