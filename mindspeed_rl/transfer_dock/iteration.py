"""One iteration of a dock: where every value is, how far each consumer got, and what has to be done again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.arrays import Shared, as_index, members
from mindspeed_rl.transfer_dock.checks import instance, integer
from mindspeed_rl.transfer_dock.progress import Progress
from mindspeed_rl.transfer_dock.selection import Choice, FilterState, SelectionState
from mindspeed_rl.transfer_dock.spec import DockSpec, Filter, Selection


@dataclass
class Lease:
    """Units that a consumer holds."""

    iteration: int
    consumer: str
    share: int
    units: np.ndarray
    holder: str | None  # process that holds them, if it gives signs of life
    since: float


@dataclass(frozen=True)
class Begin:
    """Arguments with which an iteration was begun."""

    num_prompts: int
    n_samples: int
    block_rows: int
    orders: Mapping[str, Sequence[int]]
    selection: Selection | Filter | None = None

    @classmethod
    def checked(
        cls,
        num_prompts: int,
        n_samples: int,
        block_rows: int,
        orders: Mapping[str, Sequence[int]] | None,
        selection: Selection | Filter | None,
    ) -> Begin:
        """Of the right types and in range, with orders of its own that the caller's later changes do not reach."""
        sizes = {"num_prompts": num_prompts, "n_samples": n_samples, "block_rows": block_rows}
        whole = {name: integer(name, size, least=1) for name, size in sizes.items()}
        instance("orders", orders or {}, Mapping)
        if selection is not None and not isinstance(selection, Filter):
            instance("selection", selection, Selection)
        copies: dict[str, Any] = {}
        for name, order in (orders or {}).items():
            try:
                copies[name] = np.array(order)
            except ValueError as error:  # lists of different lengths
                raise DockError(f"the order for consumer '{name}' is not a permutation: {order!r:.80}") from error
        return cls(**whole, orders=copies, selection=selection)


class Iteration:
    """Rows of one iteration. `ages`: [prompts] iterations that each group was part of before (with a selection)."""

    def __init__(self, spec: DockSpec, begin: Begin, ages: np.ndarray | None = None):
        unknown = [name for name in begin.orders if name not in spec.consumers]
        if unknown:
            raise DockError(f"orders for unknown consumers {unknown}; there are {list(spec.consumers)}")
        self.spec, self.begin = spec, begin
        self.rows = begin.num_prompts * begin.n_samples
        # payload id << 32 | index in the payload; 0: absent
        self.locations = {name: np.zeros(self.rows, np.int64) for name in spec.columns}
        self.lengths = {column: np.zeros(self.rows, np.int32) for column in spec.balancing}
        self.selection = self._new_choice(np.zeros(begin.num_prompts, np.int32) if ages is None else ages)
        self.progress = {name: self._new_progress(name) for name in spec.consumers}
        self.generated = [c for consumer in spec.consumers.values() if consumer.all_prompts for c in consumer.puts]
        self._lacking = self._count_lacking()  # [prompts] generated values that each group lacks
        self.payloads: set[int] = set()
        self.lost: dict[str, np.ndarray] = {}  # column that no consumer puts -> rows whose value is lost
        self.carried_to: int | None = None  # iteration that began with the groups that this one has not selected

    def _new_choice(self, ages: np.ndarray) -> Choice | None:
        chosen = self.begin.selection
        if chosen is None:
            return None
        makers = [name for name, consumer in self.spec.consumers.items() if consumer.all_prompts]
        if not makers:
            raise DockError("a selection needs a consumer with all_prompts: nobody else completes groups")
        if isinstance(chosen, Selection):
            return SelectionState(chosen, ages, self.spec.guarantee_order)
        if ordered := [name for name in makers if name in self.begin.orders]:
            raise DockError(f"orders for {ordered}, which work on all prompts: with a filter, there will be more")
        return FilterState(chosen, ages, self.spec.guarantee_order)

    def _new_progress(self, name: str) -> Progress:
        consumer, begin = self.spec.consumers[name], self.begin
        selected, block_rows = None, begin.block_rows
        if self.selection is not None and not consumer.all_prompts:
            selected = self.selection.prompts * begin.n_samples
        elif isinstance(self.selection, FilterState) and consumer.shares > 1:
            # waves of prompts begin and end within blocks: only small ones give the shares equal parts of each
            block_rows = begin.n_samples * consumer.shares

        def deal_out(rows: np.ndarray) -> Sequence[Sequence[int]]:
            assert self.spec.partition is not None
            lengths = sum(self.lengths[column][rows].astype(np.int64) for column in consumer.balance)
            parts = [sorted(part) for part in self.spec.partition(np.asarray(lengths), consumer.shares)]
            whole = sorted(index for part in parts for index in part) == list(range(len(rows)))
            if not whole or len({len(part) for part in parts}) > 1 or len(parts) != consumer.shares:
                raise DockError(f"the partition for '{name}' is not one of {len(rows)} rows into equally many")
            return [list(map(int, part)) for part in parts]

        return Progress(
            name,
            consumer,
            self.rows,
            begin.n_samples,
            block_rows,
            begin.orders.get(name),
            self.spec.guarantee_order,
            selected,
            deal_out if consumer.balance else None,
        )

    # --- values

    def locations_of(self, rows: np.ndarray, columns: Sequence[str]) -> dict[str, np.ndarray]:
        """Where the values of rows are, by column: one array for columns that were put together."""
        index, shared = as_index(rows), Shared()
        return {column: shared(self.locations[column][index].copy()) for column in columns}

    def check_put(self, number: int, rows: np.ndarray, columns: Iterable[str]) -> None:
        """Raise `DockError` if values of these rows and columns would be refused; `number`: of the iteration."""
        if rows.min() < 0 or rows.max() >= self.rows:
            outside = rows[(rows < 0) | (rows >= self.rows)]
            raise DockError(f"put: row {outside[0]} is outside iteration {number}, which has {self.rows} rows")
        index = as_index(rows)
        for column in columns:
            if column not in self.locations:
                raise DockError(f"put: unknown column '{column}'; there are {list(self.locations)}")
            present = self.locations[column][index]
            if present.any() and not self.spec.columns[column].replaceable:
                row = rows[np.flatnonzero(present)[0]]
                raise DockError(f"put: row {row} of iteration {number} has column '{column}' already")

    def check_results(self, number: int, consumer: str, rows: np.ndarray, columns: Collection[str] = ()) -> None:
        """Raise `DockError` if these rows would be done for a consumer without a value that it puts.

        columns: that come with the acknowledgement.
        """
        spec = self.spec.consumers[consumer]
        if self.selection is not None and spec.all_prompts and self.selection.may_stay_unfinished:
            return  # rows that the iteration does not need are left unfinished
        index = as_index(rows)
        for column in [column for column in spec.puts if column not in columns]:
            absent = self.locations[column][index] == 0
            if absent.any():
                row = rows[np.flatnonzero(absent)[0]]
                raise DockError(f"ack: '{consumer}' puts '{column}', which row {row} of iteration {number} lacks")

    def place(
        self, rows: np.ndarray, columns: Sequence[str], payload: int, lengths: Mapping[str, np.ndarray]
    ) -> list[str]:
        """Values of `columns` for `rows` are in `payload`, in that order; returns consumers that may go on."""
        self.payloads.add(payload)
        locations = (payload << 32) + np.arange(len(rows), dtype=np.int64)
        index = as_index(rows)
        for column in columns:
            self.locations[column][index] = locations
            if column in self.lengths:
                self.lengths[column][index] = lengths[column]
            if column in self.lost:
                self.lost[column] = np.setdiff1d(self.lost[column], rows)
        woken = []
        for name, progress in self.progress.items():
            values = sum(column in progress.spec.needs for column in columns)
            if values and progress.arrived(rows, values):
                woken.append(name)
        if self.selection is not None and any(column in self.generated for column in columns):
            prompts = rows // self.begin.n_samples
            np.subtract.at(self._lacking, prompts, sum(column in self.generated for column in columns))
            woken += self._select(np.unique(prompts))
        return woken

    def _select(self, prompts: np.ndarray) -> list[str]:
        """See which of these groups are complete now, and what follows from that."""
        assert self.selection is not None
        complete = prompts[(self._lacking[prompts] == 0) & ~self.selection.complete[prompts]]
        selected = self.selection.completed(complete.tolist())
        self._bind(selected)
        return list(self.progress) if self.close_if_enough() or selected else []

    def _bind(self, selected: list[int]) -> None:
        """The stages behind get these groups next."""
        rows = members(selected, self.begin.n_samples)
        for progress in self.progress.values():
            if selected and not progress.spec.all_prompts:
                present = np.stack([self.locations[column][rows] > 0 for column in progress.spec.needs])
                progress.bind(rows, present.sum(axis=0, dtype=np.int32))

    def close_if_enough(self) -> bool:
        """With a selection: stop handing rows out for generation once enough is complete. True if that is so."""
        if self.selection is None:
            return False
        enough = self.selection.is_enough and not self._lacking[self.selection.selected].any()
        for progress in self.progress.values():
            if progress.spec.all_prompts:
                # groups in their last iteration can only be ended by those who generate them
                held = not any(progress.queue.remaining(share) for share in range(progress.spec.shares))
                progress.closed = enough and (self.selection.is_over or held)
        return enough

    def describe_selection(self) -> str:
        """How far a selection is."""
        assert self.selection is not None
        groups = self.selection.counts
        rejected = f" and {groups['rejected']} of them rejected" if "rejected" in groups else ""
        return f"{groups['complete']} groups are complete{rejected}, {self.selection.prompts} are needed"

    def _count_lacking(self) -> np.ndarray:
        absent = np.zeros(self.rows, np.int64)
        for column in self.generated:
            absent += self.locations[column] == 0
        return absent.reshape(-1, self.begin.n_samples).sum(axis=1)

    # --- filtered groups

    @property
    def filter(self) -> FilterState:
        """Of an iteration that was begun with a filter; `DockError` for another."""
        if not isinstance(self.selection, FilterState):
            raise DockError("the iteration was not begun with a filter")
        return self.selection

    def check_rejected(self, consumer: str, rows: np.ndarray, rejected: np.ndarray) -> None:
        """Raise `DockError` unless a consumer that is done with `rows` can reject these among them."""
        if not isinstance(self.selection, FilterState) or not self.spec.consumers[consumer].all_prompts:
            raise DockError(f"ack: '{consumer}' cannot reject groups: that needs a filter, and all_prompts")
        if (foreign := np.setdiff1d(rejected, rows)).size:
            raise DockError(f"ack: row {foreign[0]} is rejected, but is not one that '{consumer}' is done with")

    def judge(self, rows: np.ndarray, rejected: np.ndarray) -> None:
        """The groups of `rejected` are not to be selected, those of the other rows may be."""
        group = self.begin.n_samples
        self.filter.judge(rows // group, rejected // group)

    def extend(self, prompts: int) -> None:
        """See `TransferDock.extend`."""
        if self.filter.is_over:
            raise DockError("extend: enough groups are selected")
        makers = {name: progress for name, progress in self.progress.items() if progress.spec.all_prompts}
        for name, progress in makers.items():
            if undone := int((progress.acked_by == 0).sum()) * progress.unit_rows:
                raise DockError(f"extend: '{name}' is not done with {undone} of {self.rows} rows")
        more = prompts * self.begin.n_samples
        done = np.arange(self.rows + more) < self.rows
        self.begin = replace(self.begin, num_prompts=self.begin.num_prompts + prompts)
        self.rows += more
        self.locations = {name: np.pad(values, (0, more)) for name, values in self.locations.items()}
        self.lengths = {name: np.pad(values, (0, more)) for name, values in self.lengths.items()}
        self.filter.extend(prompts)
        for name, progress in self.progress.items():
            if name in makers:
                self._renew(name, done)
            else:
                progress.extend(more)
        self._lacking = self._count_lacking()

    def fill(self) -> None:
        """See `TransferDock.fill`."""
        self._bind(self.filter.fill())

    # --- what the next iteration takes over

    def carry_from(self, former: Iteration) -> int:
        """Take over what a former iteration has not selected, as first prompts; returns how many those are."""
        assert former.selection is not None
        ours, theirs = self.begin.n_samples, former.begin.n_samples
        if ours != theirs:
            raise DockError(f"n_samples = {ours}: groups of {theirs} are carried over")
        if former.carried_to is not None:
            raise DockError(f"the groups were carried over to iteration {former.carried_to} before")
        if not former.selection.is_over:
            raise DockError("an iteration's groups are carried over only when its selection is complete")
        prompts = former.selection.left()
        if len(prompts) > self.begin.num_prompts:
            raise DockError(f"num_prompts = {self.begin.num_prompts}: {len(prompts)} groups are carried over")
        rows = members(prompts, self.begin.n_samples)
        for name, values in former.locations.items():
            self.locations[name][: len(rows)] = values[rows]
        for name, numbers in former.lengths.items():
            self.lengths[name][: len(rows)] = numbers[rows]
        ids = {int(key) for values in self.locations.values() for key in np.unique(values[: len(rows)] >> 32)}
        self.payloads |= ids - {0}
        self.lost = {name: np.flatnonzero(np.isin(rows, lost)) for name, lost in former.lost.items()}
        for name, progress in self.progress.items():
            if progress.spec.all_prompts:  # rows that are complete need no more of it
                self._renew(name, np.stack([self.locations[column] > 0 for column in progress.spec.puts]).min(axis=0))
            else:
                self._rebuild(name, progress.state(), {})
        self._lacking = self._count_lacking()
        self._select(np.arange(len(prompts)))
        return len(prompts)

    def _renew(self, name: str, done: np.ndarray) -> None:
        """A consumer with all_prompts begins anew; the rows `done`, in whole units, need no work."""
        progress = self._new_progress(name)
        by_unit = done[progress.rows_of(np.arange(len(progress.missing)))].reshape(-1, progress.unit_rows)
        units = np.flatnonzero(by_unit.all(axis=1))
        acked_by = np.zeros_like(progress.acked_by)
        acked_by[units] = progress.owner[units] + 1
        self.progress[name] = progress
        self._rebuild(name, {**progress.state(), "acked_by": acked_by}, {})

    def _rebuild(self, name: str, state: dict[str, Any], out: dict[int, list[int]]) -> None:
        progress = self.progress[name]
        needed = np.stack([self.locations[column] for column in progress.spec.needs])
        self.progress[name] = progress.rebuild(state, needed, out)

    # --- losses

    def lose(self, payloads: Iterable[int], leases: Mapping[int, Lease]) -> tuple[dict[str, list[int]], list[int]]:
        """The values in these payloads are gone.

        What some consumer has yet to work with is made again: its maker gets the rows back, and so does everybody in
        between who made something of the old values. Rows that all consumers have acknowledged need nothing any more.
        Values that no consumer makes are named in `lost`.

        Args:
            payloads: their ids.
            leases: this iteration's leases by number.

        Returns:
            Rows that are done again by consumer, with those that are begun anew, and the leases that end because
            what they were to read is gone or will be made again.
        """
        missing = list(payloads)
        dead = {name: np.isin(values >> 32, missing) for name, values in self.locations.items()}
        self.payloads -= set(missing)
        redo, outdated = self._redo(dead)
        self._name_lost(dead, redo)
        gone = {name: dead[name] | outdated[name] for name in dead}
        ended = [number for number, lease in leases.items() if self._reads_any(lease, gone)]
        for name, rows in gone.items():
            self.locations[name][rows] = 0
        for name, progress in self.progress.items():
            state = progress.state()
            state["acked_by"][progress.units_of(np.flatnonzero(redo[name]))] = 0
            out: dict[int, list[int]] = {}
            for number, lease in leases.items():
                if lease.consumer == name and number not in ended:
                    out.setdefault(lease.share, []).extend(lease.units)
            self._rebuild(name, state, out)
        if self.selection is not None:
            self._lacking = self._count_lacking()
            self.selection.incomplete(np.flatnonzero(self._lacking).tolist())
            self.close_if_enough()
        for name, rows in redo.items():
            rows |= self._begun_anew(name, dead)
        return {name: np.flatnonzero(rows).tolist() for name, rows in redo.items() if rows.any()}, ended

    def _begun_anew(self, name: str, dead: Mapping[str, np.ndarray]) -> np.ndarray:
        """[rows] bool: this consumer has yet to do them, here, and what it had begun of them is gone."""
        if self.carried_to is not None:
            return np.zeros(self.rows, bool)  # what is unfinished goes on there
        begun = [c for c in self.progress[name].spec.reads if self.spec.columns[c].replaceable]
        lost = np.any([np.zeros(self.rows, bool), *(dead[column] for column in begun)], axis=0)
        return lost & ~self.progress[name].done_rows(self.rows)

    def _redo(self, dead: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Rows that each consumer has done and must do again, and rows of each column whose value is out of date.

        A value is out of date if it, or something it was made of, is made again. It is made again itself if, beside
        that or being gone, somebody has yet to work with it: has not done the row, or must do it again.
        """
        none = np.zeros(self.rows, bool)
        acked = {name: progress.done_rows(self.rows) for name, progress in self.progress.items()}
        redo = {name: none.copy() for name in self.progress}
        outdated = {column: none.copy() for column in self.locations}
        readers = {c: [n for n, consumer in self.spec.consumers.items() if c in consumer.needs] for c in outdated}
        while True:
            before = sum(int(rows.sum()) for rows in (*redo.values(), *outdated.values()))
            for name, progress in self.progress.items():
                renewed = np.any([outdated[column] for column in progress.spec.needs], axis=0)
                renewed = acked[name] & _whole_units(progress, renewed)
                for column in progress.spec.puts:
                    absent = dead[column] | (self.locations[column] == 0)
                    wanted = np.any([none, *(~acked[reader] | redo[reader] for reader in readers[column])], axis=0)
                    redo[name] |= _whole_units(progress, acked[name] & wanted & (absent | renewed))
                for column in progress.spec.puts:
                    outdated[column] |= redo[name] | renewed
            if sum(int(rows.sum()) for rows in (*redo.values(), *outdated.values())) == before:
                return redo, outdated

    def _name_lost(self, dead: Mapping[str, np.ndarray], redo: Mapping[str, np.ndarray]) -> None:
        """Note needed values that no consumer makes: dead ones, and earlier dead ones of rows done again."""
        made = {column for consumer in self.spec.consumers.values() for column in consumer.puts}
        for name, rows in dead.items():
            if name in made or self.spec.columns[name].replaceable:
                continue
            absent = rows | (self.locations[name] == 0)
            for reader, progress in self.progress.items():
                if name in progress.spec.needs:
                    needed = rows & ~progress.done_rows(self.rows) | absent & redo[reader]
                    if needed.any():
                        self.lost[name] = np.union1d(self.lost.get(name, []), np.flatnonzero(needed)).astype(np.int64)

    def _reads_any(self, lease: Lease, gone: Mapping[str, np.ndarray]) -> bool:
        progress = self.progress[lease.consumer]
        rows = progress.rows_of(lease.units)
        return any(gone[column][rows].any() for column in progress.spec.reads)

    def check_not_lost(self, number: int, consumer: str) -> None:
        """Raise `DockError` if rows can never become ready for a consumer because their values are lost."""
        progress = self.progress[consumer]
        for column in progress.spec.needs:
            rows = self.lost.get(column, np.empty(0, np.int64))
            if rows.size:
                rows = np.intersect1d(rows, progress.rows_of(np.flatnonzero(progress.acked_by == 0)))
            if rows.size:
                shown = ", ".join(map(str, rows[:4].tolist())) + (", …" if rows.size > 4 else "")
                raise DockError(
                    f"'{column}' of {rows.size} rows ({shown}) of iteration {number} is lost with the process that "
                    f"put it, and no consumer makes it: put it again, or clear the iteration"
                )

    # --- snapshots

    def state(self) -> dict[str, Any]:
        """Plain state; rows under a lease count as not handed out."""
        return {
            "begin": self.begin,
            "selection": None if self.selection is None else self.selection.state(),
            "locations": {name: values.copy() for name, values in self.locations.items()},
            "lengths": {name: values.copy() for name, values in self.lengths.items()},
            "progress": {name: progress.state() for name, progress in self.progress.items()},
            "payloads": sorted(self.payloads),
            "lost": {name: rows.copy() for name, rows in self.lost.items()},
            "carried_to": self.carried_to,
        }

    @classmethod
    def restored(cls, spec: DockSpec, state: Mapping[str, Any]) -> Iteration:
        """The iteration that `state` was taken from."""
        chosen = state["selection"]
        iteration = cls(spec, state["begin"], None if chosen is None else chosen["ages"])
        if iteration.selection is not None:
            iteration.selection.restore(chosen)
        for name, array in state["locations"].items():
            iteration.locations[name][:] = array
        # where there was nothing to balance and now is, they are not known, and these rows count as empty ones
        for name in iteration.lengths.keys() & state["lengths"].keys():
            iteration.lengths[name][:] = state["lengths"][name]
        for name in iteration.progress:
            iteration._rebuild(name, state["progress"][name], {})
        iteration.payloads = set(state["payloads"])
        iteration.lost, iteration.carried_to = dict(state["lost"]), state["carried_to"]
        iteration._lacking = iteration._count_lacking()
        iteration.close_if_enough()
        return iteration


def _whole_units(progress: Progress, rows: np.ndarray) -> np.ndarray:
    """[rows] bool: these, and for a grouped consumer all others of their groups."""
    if progress.unit_rows == 1:
        return rows
    return np.repeat(rows.reshape(-1, progress.unit_rows).any(axis=1), progress.unit_rows)
