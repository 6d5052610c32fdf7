"""What the dock's hand-out of rows means: an independent model that tests compare it with."""

from mindspeed_rl.transfer_dock.spec import NOT_YET


class Reference:
    """One consumer of one iteration, by plain lists and exhaustive search.

    Units are rows, or whole groups for a grouped consumer, as tuples. `present`: {row: columns that are there}.
    """

    def __init__(self, needs, shares, grouped, keep_order, rows, group, block, order):
        self.needs, self.keep_order = set(needs), keep_order
        self.unit = group if grouped else 1
        order = list(order)
        self.units = [tuple(order[i : i + self.unit]) for i in range(0, rows, self.unit)]
        per_block = block // self.unit
        self.block_of = {unit: index // per_block for index, unit in enumerate(self.units)}
        self.owned = [[] for _ in range(shares)]
        for start in range(0, len(self.units), per_block):
            chunk = self.units[start : start + per_block]
            for share in range(shares):
                self.owned[share] += chunk[share * len(chunk) // shares : (share + 1) * len(chunk) // shares]
        self.out = [[] for _ in range(shares)]  # handed out, unfinished
        self.done = [[] for _ in range(shares)]
        self.ready = []  # by time of readiness

    def is_ready(self, unit, present):
        return all(self.needs <= present[row] for row in unit)

    def settle(self, present, rows):
        if not self.keep_order:
            touched = dict.fromkeys(self.unit_of(row) for row in rows)
            gone = {unit for held in self.out + self.done for unit in held}
            self.ready += [u for u in touched if self.is_ready(u, present) and u not in self.ready and u not in gone]

    def claim(self, share, count, present):
        count //= self.unit
        if self.keep_order:
            taken = set(self.out[share] + self.done[share])
            pending = [unit for unit in self.owned[share] if unit not in taken]
            chosen = [unit for unit in pending if self.block_of[unit] == self.block_of[pending[0]]][:count]
            granted = bool(chosen) and all(self.is_ready(unit, present) for unit in chosen)
        else:
            left = len(self.owned[share]) - len(self.out[share]) - len(self.done[share])
            chosen = self.ready[: min(left, count)]
            granted = bool(chosen) and len(chosen) == min(left, count)
        if not granted:
            return None if len(self.done[share]) == len(self.owned[share]) else NOT_YET
        self.out[share] += chosen
        self.ready = [unit for unit in self.ready if unit not in chosen]
        return [row for unit in chosen for row in unit]

    def end(self, share, rows, acked):
        units = [tuple(rows[i : i + self.unit]) for i in range(0, len(rows), self.unit)]
        self.out[share] = [unit for unit in self.out[share] if unit not in units]
        if acked:
            self.done[share] += units
        elif not self.keep_order:
            self.ready = units + self.ready

    def unit_of(self, row):
        return next(unit for unit in self.units if row in unit)

    def has_done(self, row):
        return any(row in unit for units in self.done for unit in units)

    def again(self, unit):
        """A unit that was done must be done again, by the same share."""
        for units in self.done:
            if unit in units:
                units.remove(unit)
