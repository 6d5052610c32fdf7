"""What a TransferDock holds and who reads it, and the claim by which a reader holds rows.

A *row* is one sample of one iteration: `row = prompt * n_samples + sample`. A *column* is one value of every row,
put once. A *consumer* is a stage that may take a row as soon as all columns it needs are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, Protocol

import numpy as np

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.checks import instance, integer, seconds

_MOST_SHARES = 2**15 - 2  # what the state of a row has room for
DEFAULT_TIMEOUT: Final = 600.0
"""Seconds that a claim or put waits at most unless told otherwise."""

Kind = Literal["jagged", "scalar", "object"]
DType = Literal["int64", "float32", "object"]


@dataclass(frozen=True)
class ColumnSpec:
    """One column. `jagged`: a 1-D tensor a row; `scalar`: a number a row; `object`: anything picklable a row.

    A value is put once, except in a `replaceable` column, where a later one takes its place.
    """

    dtype: DType
    kind: Kind = "jagged"
    replaceable: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("jagged", "scalar", "object"):
            raise DockError(f"column kind {self.kind!r}: expected 'jagged', 'scalar' or 'object'")
        allowed = ("object",) if self.kind == "object" else ("int64", "float32")
        if self.dtype not in allowed:
            raise DockError(
                f"column dtype {self.dtype!r}: a column of kind {self.kind!r} takes {' or '.join(allowed)}"
            )
        instance("replaceable", self.replaceable, bool)


@dataclass(frozen=True)
class ConsumerSpec:
    """One stage: what it reads, what it puts, and how rows are handed to it.

    needs: columns that a row must have to be handed out; they can be read.
    optional: columns that can be read where they are there.
    puts: columns that the stage makes out of those. If their values are lost (with the process that held them), the
        rows are handed out again. A stage that puts nothing, such as the update, is final: it sees a row only once.
    shares: data-parallel parts of the rows, claimed separately.
    grouped: hand out whole groups only.
    balance: columns whose lengths, added up, are the length of a row: the rows of each block are dealt out to the
        shares by `DockSpec.partition` instead of in equal contiguous parts, once all of them are ready.
    all_prompts: with a selection or filter (see `TransferDock.begin`): sees all rows, not only the selected ones.
    max_staleness: an iteration's rows are handed out once the policy version (see `TransferDock.advance`) is at most
        this far behind the iteration's number.
    """

    needs: tuple[str, ...]
    shares: int = 1
    grouped: bool = False
    puts: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    balance: tuple[str, ...] = ()
    all_prompts: bool = False
    max_staleness: int | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that its claims give access to."""
        return (*self.needs, *self.optional)


Partition = Callable[[np.ndarray, int], Sequence[Sequence[int]]]
"""(lengths [n] of the rows of a block, parts) -> equally many indices below n, ascending, for each part."""


@dataclass(frozen=True)
class Selection:
    """How an iteration ends before all of its prompts are complete (partial rollout).

    prompts: groups that are trained on. The others are carried over to the next iteration, with all they have.
    max_iterations: a group belongs to the selection of its `max_iterations`-th iteration at the latest.
    finish_oldest: that iteration ends only when such groups are complete; otherwise whoever generates them ends them
        where they are as soon as enough others are complete.
    """

    prompts: int
    max_iterations: int
    finish_oldest: bool = True


@dataclass(frozen=True)
class Filter:
    """How an iteration gets enough groups when some turn out to be of no use (dynamic sampling).

    A group is judged when it is complete: see `rejected` of `TransferDock.ack`. While too few qualify, prompts are
    added (`TransferDock.extend`); when there are to be no more, rejected groups make up the number
    (`TransferDock.fill`). Surplus groups that qualify are carried over to the next iteration, with all they have.

    prompts: groups that are trained on.
    """

    prompts: int


@dataclass(frozen=True)
class DockSpec:
    """Columns, consumers and limits of a dock. Raises `DockError` for a specification that contradicts itself.

    `lease_seconds`: rows that were claimed are handed out again once the process that holds them has been silent for
    so long. Processes say by themselves that they live, unless `renew_leases` is false: then a lease simply ends.
    `max_bytes`: while live payloads exceed it, puts for any iteration but the oldest one alive wait. The oldest is
    exempt because only its completion frees memory: holding it back would be a deadlock.
    `partition`: shares out the blocks of consumers with `balance`; what it raises, the claim raises that needs it.
    """

    columns: dict[str, ColumnSpec]
    consumers: dict[str, ConsumerSpec]
    guarantee_order: bool = True
    lease_seconds: float = 60.0
    renew_leases: bool = True
    max_bytes: int | None = None
    partition: Partition | None = None

    def __post_init__(self) -> None:
        made: dict[str, str] = {}
        for name, spec in self.columns.items():
            instance(f"column '{name}'", spec, ColumnSpec)
        for name, consumer in self.consumers.items():
            instance(f"consumer '{name}'", consumer, ConsumerSpec)
            self._check_consumer(name, consumer)
            for column in consumer.puts:
                if column in made:
                    raise DockError(f"consumers '{made[column]}' and '{name}' both put column '{column}'")
                made[column] = name
        self._check_sequence(made)
        for flag in ("guarantee_order", "renew_leases"):
            instance(flag, getattr(self, flag), bool)
        seconds("lease_seconds", self.lease_seconds, above_zero=True)
        if self.max_bytes is not None:
            integer("max_bytes", self.max_bytes, least=1)

    @property
    def balancing(self) -> set[str]:
        """Columns that some consumer is balanced by."""
        return {column for consumer in self.consumers.values() for column in consumer.balance}

    def _check_sequence(self, made: Mapping[str, str]) -> None:
        """Refuse consumers that would wait for each other for ever."""
        there = {column for column in self.columns if column not in made}
        waiting = dict(self.consumers)
        while ready := [name for name, consumer in waiting.items() if there.issuperset(consumer.needs)]:
            for name in ready:
                there.update(waiting.pop(name).puts)
        if waiting:
            raise DockError(f"consumers {list(waiting)} need, directly or not, what they put themselves")
        for name, consumer in self.consumers.items():
            late = [c for c in consumer.needs if c in made and not self.consumers[made[c]].all_prompts]
            if consumer.all_prompts and late:
                raise DockError(
                    f"consumer '{name}' has all_prompts and needs {late}, which '{made[late[0]]}' puts for selected "
                    "groups only: those that it completes itself"
                )

    def _check_consumer(self, name: str, consumer: ConsumerSpec) -> None:
        for field in ("needs", "optional", "puts", "balance"):
            instance(f"{field} of consumer '{name}'", getattr(consumer, field), tuple)
        for field in ("grouped", "all_prompts"):
            instance(f"{field} of consumer '{name}'", getattr(consumer, field), bool)
        for what, columns in (("needs", consumer.needs), ("optional", consumer.optional), ("puts", consumer.puts)):
            unknown = [column for column in columns if column not in self.columns]
            if unknown:
                raise DockError(f"consumer '{name}' {what} unknown columns {unknown}; there are {list(self.columns)}")
        if not consumer.needs or len(set(consumer.reads)) != len(consumer.reads):
            raise DockError(f"consumer '{name}' needs {consumer.needs}: expected one or more different columns")
        for column in consumer.needs:
            if self.columns[column].replaceable:
                raise DockError(f"consumer '{name}' needs '{column}': a replaceable column can only be optional")
        scalars = [column for column in consumer.optional if self.columns[column].kind == "scalar"]
        if scalars:
            raise DockError(f"consumer '{name}' has optional scalars {scalars}: a scalar cannot be absent")
        if set(consumer.needs) & set(consumer.puts):
            raise DockError(f"consumer '{name}' both needs and puts {set(consumer.needs) & set(consumer.puts)}")
        if integer(f"consumer '{name}' has shares", consumer.shares, least=1) > _MOST_SHARES:
            raise DockError(f"consumer '{name}' has shares = {consumer.shares}: expected at most {_MOST_SHARES}")
        if consumer.max_staleness is not None:
            integer(f"consumer '{name}' has max_staleness", consumer.max_staleness, least=0)
        if consumer.all_prompts and not consumer.puts:
            raise DockError(f"consumer '{name}' has all_prompts but puts nothing: its values complete a group")
        if not consumer.balance:
            return
        if consumer.all_prompts:
            raise DockError(f"consumer '{name}' has all_prompts: it cannot be balanced by {consumer.balance}")
        if self.partition is None or not self.guarantee_order or consumer.grouped:
            raise DockError(
                f"consumer '{name}' is balanced by {consumer.balance}: that needs a partition, "
                "guarantee_order: true, and grouped: false"
            )
        flat = [c for c in consumer.balance if c not in consumer.needs or self.columns[c].kind != "jagged"]
        if flat:
            raise DockError(f"consumer '{name}' is balanced by {flat}: expected jagged columns that it needs")


ABSENT: Final = 0  # in the place of a payload id, which start at 1


class NotYet(Enum):
    """Type of `NOT_YET`, the answer of `try_claim` when rows may come later."""

    NOT_YET = "not yet"


NOT_YET: Final = NotYet.NOT_YET


@dataclass(frozen=True, eq=False)
class Claim:
    """Rows held by a consumer under a lease, and where their values are.

    Plain data: pickled and sent to the other ranks of a model-parallel group, it lets them `get` the same rows
    without asking the controller. It holds addresses, not payloads: it is good until its iteration is cleared
    (from then on `get` raises `DockError`, or still finds the values while memory is being freed).
    """

    consumer: str
    iteration: int
    share: int
    lease: int
    rows: tuple[int, ...]
    # column -> [len(rows)] int64: payload id << 32 | index of the row in that payload; one array for equal ones
    locations: dict[str, np.ndarray]
    payloads: dict[int, Any]  # payload id -> address
    oldest_iteration: int  # oldest one alive at the claim; what readers cached of earlier ones is dropped
    last: tuple[bool, ...] = ()  # with a selection: which rows are of a group in its last iteration

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """What the consumer reads."""
        return tuple(self.locations)


@dataclass(frozen=True)
class DockSnapshot:
    """State and payloads of a dock: picklable, and independent of the dock that it was taken from."""

    state: dict[str, Any]
    payloads: dict[int, Any]


class TransferDock(Protocol):
    """What every dock does. Misuse raises `DockError` and changes nothing; a wait past its deadline `DockTimeout`."""

    spec: DockSpec

    def begin(
        self,
        iteration: int,
        num_prompts: int,
        n_samples: int,
        block_rows: int,
        orders: Mapping[str, Sequence[int]] | None = None,
        selection: Selection | Filter | None = None,
        carry_from: int | None = None,
    ) -> int:
        """Open an iteration of `num_prompts * n_samples` rows.

        Every consumer's rows are cut, in that consumer's order, in blocks of `block_rows` (a mini-batch; the last one
        may be shorter); share d of D owns the d-th contiguous 1/D of every block, unless the consumer is balanced.
        `orders[consumer]` is a permutation of the rows (default: ascending) and needs `guarantee_order`.

        With a `selection`, consumers with `all_prompts` work on all rows until enough groups have all values that
        those consumers put: then they get no more rows, and every other consumer sees the selected groups only, as so
        many rows (and `orders` are permutations of 0 … selected rows − 1). With `carry_from`, an iteration whose
        selection is complete, the groups that it did not select are the first prompts here, those that took part
        longest first, with all their values; that is possible once.

        With a `Filter`, too, stages behind see the selected groups only: without `guarantee_order` each that is
        complete and not rejected, with it the first such groups once all groups are complete. `num_prompts` are those
        to be put: what is carried over, surplus groups that qualify, comes before them and on top. `orders` are for
        stages behind only; of stages with `all_prompts`, each share has equally many groups of a wave, give or take
        one.

        Returns the number of prompts carried over: values of the other rows are still to be put.
        """

    def extend(self, iteration: int, num_prompts: int) -> None:
        """With a `Filter`: add prompts, as last rows; their values are still to be put.

        Refused while rows are not done that are there already, and when enough groups are selected.
        """

    def fill(self, iteration: int) -> None:
        """With a `Filter`: no more prompts come; rejected groups, the first ones, make up for groups that qualify.

        Refused while groups are incomplete, or if all of them together are too few.
        """

    def put(
        self,
        iteration: int,
        rows: Sequence[int],
        columns: Mapping[str, Sequence[Any]],
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Store values of `columns` for `rows`; returns once they are visible, all of them at once.

        For values that come from outside, such as prompts; stages hand in their results by `ack`.
        Values: `jagged` 1-D tensors of the column's dtype, or one `Jagged`, which is stored as it lies; `scalar`
        numbers or one 1-D tensor; `object` anything picklable; one value a row. A tensor or object given for several
        rows is stored once.
        """

    def claim(
        self,
        consumer: str,
        iteration: int,
        count: int,
        share: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Claim | None:
        """Wait for `count` rows of a share and lease them; None once nothing of the share is left to do.

        Fewer rows come at the end of the share. With `guarantee_order` rows come strictly in order, and a claim also
        ends where a block ends, so that a micro-batch never reaches over two mini-batches. Without it, rows come in
        the order in which they became ready, up to the share's number of rows. A grouped consumer asks for, and
        gets, whole groups. Rows that others hold for the same share may still come back, so a claim waits for
        them: acknowledge what you hold before the last claim, or look ahead with `try_claim`.
        """

    def try_claim(self, consumer: str, iteration: int, count: int, share: int = 0) -> Claim | NotYet | None:
        """As `claim` without waiting: `NOT_YET` where `claim` would wait."""

    def get(self, claim: Claim, columns: Sequence[str]) -> dict[str, Any]:
        """Values of a claim's rows, for columns among what the consumer reads.

        `jagged`: a `Jagged`, a sequence of 1-D tensors; `scalar`: one tensor [rows]; `object`: list. Where optional
        values are not there, a list with None. Tensors of jagged columns are views of shared memory that other
        processes read too: never write to them.

        Raises `RowsLost` if the process that put values died. The dock knows it then: what somebody still needs is
        made again by the consumer that makes it, and this claim's lease has ended. Claim again.
        """

    def ack(
        self,
        claim: Claim,
        columns: Mapping[str, Sequence[Any]] | None = None,
        rows: Sequence[int] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        rejected: Sequence[int] | None = None,
    ) -> None:
        """The consumer is done with the claim's rows, or with these `rows` of it (whole groups if it is grouped).

        `columns` are the results for just those rows: stored and acknowledged in one step, so that a row is either
        done with all its results or handed out again. Refused, with nothing stored, when the lease has ended, or when
        a row would lack something that the consumer puts (unless a selection may leave rows of it unfinished).

        `rejected` are those of the rows whose groups a `Filter` is not to select, none or more; those of the other
        rows qualify. Only consumers with `all_prompts` judge, and only together with results.
        """

    def release(self, claim: Claim) -> None:
        """Give the rows back, to be handed out again at once."""

    def advance(self, version: int) -> None:
        """The policy has this version now: so many iterations were trained on. Never goes back."""

    def clear(self, iteration: int) -> None:
        """Free an iteration. Whatever comes late for it is refused; waiting claims end with `DockError`."""

    def snapshot(self) -> DockSnapshot:
        """State of all live iterations with their payloads; rows under a lease count as not handed out.

        What is found to be gone with the process that put it is reported to the dock, as by `get`, and not in it.
        """

    def restore(self, snapshot: DockSnapshot) -> None:
        """Take over a snapshot; the dock must be empty and have the same columns and consumers.

        These may have other numbers of shares, and with those be balanced or not.
        """

    def stats(self) -> dict[str, Any]:
        """State and totals, by name.

        `rows` {iteration: rows}, `rows_out` under a lease and `bytes` are of now, and so is `groups` {iteration:
        {"complete", "selected"}} of iterations with a selection or filter; with a filter also "rejected" groups, and
        "filled" ones, which are selected nonetheless. `bytes_put`, `rows_redone` (handed out again after a loss, all
        consumers) and `wait_seconds` {consumer: seconds its claims waited} are since the start.
        """
