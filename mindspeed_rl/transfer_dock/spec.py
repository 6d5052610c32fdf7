"""What a TransferDock holds and who reads it, and the claim by which a reader holds rows.

A *row* is one sample of one iteration: `row = prompt * n_samples + sample`. A *column* is one value of every row,
put once. A *consumer* is a stage that may take a row as soon as all columns it needs are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, Protocol

import numpy as np

from mindspeed_rl.common.errors import DockError

DEFAULT_TIMEOUT: Final = 600.0
"""Seconds that a claim or put waits at most unless told otherwise."""

Kind = Literal["jagged", "scalar", "object"]
DType = Literal["int64", "float32", "object"]


@dataclass(frozen=True)
class ColumnSpec:
    """One column. `jagged`: a 1-D tensor a row; `scalar`: a number a row; `object`: anything picklable a row."""

    dtype: DType
    kind: Kind = "jagged"

    def __post_init__(self) -> None:
        if self.kind not in ("jagged", "scalar", "object"):
            raise DockError(f"column kind {self.kind!r}: expected 'jagged', 'scalar' or 'object'")
        allowed = ("object",) if self.kind == "object" else ("int64", "float32")
        if self.dtype not in allowed:
            raise DockError(
                f"column dtype {self.dtype!r}: a column of kind {self.kind!r} takes {' or '.join(allowed)}"
            )


@dataclass(frozen=True)
class ConsumerSpec:
    """One reading stage: the columns it needs, its data-parallel shares, whether it takes whole groups only."""

    needs: tuple[str, ...]
    shares: int = 1
    grouped: bool = False


@dataclass(frozen=True)
class DockSpec:
    """Columns, consumers and limits of a dock. Raises `DockError` for a specification that contradicts itself.

    `lease_seconds`: rows claimed but not acknowledged for so long are handed out again.
    `max_bytes`: while live payloads exceed it, puts for any iteration but the oldest one alive wait. The oldest is
    exempt because only its completion frees memory: holding it back would be a deadlock.
    """

    columns: dict[str, ColumnSpec]
    consumers: dict[str, ConsumerSpec]
    guarantee_order: bool = True
    lease_seconds: float = 3600.0
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, consumer in self.consumers.items():
            unknown = [column for column in consumer.needs if column not in self.columns]
            if unknown:
                raise DockError(f"consumer '{name}' needs unknown columns {unknown}; there are {list(self.columns)}")
            if not consumer.needs or len(set(consumer.needs)) != len(consumer.needs):
                raise DockError(f"consumer '{name}' needs {consumer.needs}: expected one or more different columns")
            if consumer.shares < 1:
                raise DockError(f"consumer '{name}' has shares = {consumer.shares}: expected at least 1")
        if not self.lease_seconds > 0:
            raise DockError(f"lease_seconds = {self.lease_seconds}: expected more than 0")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise DockError(f"max_bytes = {self.max_bytes}: expected at least 1, or None for no limit")


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
    columns: tuple[str, ...]
    locations: np.ndarray  # [len(columns), len(rows)] int64: payload id << 32 | index of the row in that payload
    payloads: dict[int, Any]  # payload id -> address
    oldest_iteration: int  # oldest one alive at the claim; what readers cached of earlier ones is dropped

    def __len__(self) -> int:
        return len(self.rows)


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
    ) -> None:
        """Open an iteration of `num_prompts * n_samples` rows.

        Every consumer's rows are cut, in that consumer's order, in blocks of `block_rows` (a mini-batch; the last one
        may be shorter); share d of D owns the d-th contiguous 1/D of every block. `orders[consumer]` is a permutation
        of the rows (default: ascending) and needs `guarantee_order`.
        """

    def put(
        self,
        iteration: int,
        rows: Sequence[int],
        columns: Mapping[str, Sequence[Any]],
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Store values of `columns` for `rows`; returns once they are visible, all of them at once.

        Values: `jagged` 1-D tensors of the column's dtype, `scalar` numbers or one 1-D tensor, `object` anything
        picklable; one value a row. A tensor or object given for several rows is stored once.
        """

    def claim(
        self, consumer: str, iteration: int, count: int, share: int = 0, timeout: float = DEFAULT_TIMEOUT
    ) -> Claim | None:
        """Wait for `count` rows of a share and lease them; None once all rows of the share are acknowledged.

        Fewer rows come at the end of the share. With `guarantee_order` rows come strictly in order, and a claim also
        ends where a block ends, so that a micro-batch never reaches over two mini-batches. Without it, rows come in
        the order in which they became ready, up to the share's number of rows. A grouped consumer asks for, and
        gets, whole groups. Rows that others hold for the same share may still come back, so a claim waits for
        them: acknowledge what you hold before the last claim, or look ahead with `try_claim`.
        """

    def try_claim(self, consumer: str, iteration: int, count: int, share: int = 0) -> Claim | NotYet | None:
        """As `claim` without waiting: `NOT_YET` where `claim` would wait."""

    def get(self, claim: Claim, columns: Sequence[str]) -> dict[str, Any]:
        """Values of a claim's rows, for columns among the consumer's needs.

        `jagged`: list of 1-D tensors; `scalar`: one tensor [rows]; `object`: list. Jagged tensors are views of
        shared memory that other processes read too: never write to them.
        """

    def ack(self, claim: Claim) -> None:
        """The consumer is done with the rows. Refused when the lease has expired or was ended before."""

    def release(self, claim: Claim) -> None:
        """Give the rows back, to be handed out again at once."""

    def clear(self, iteration: int) -> None:
        """Free an iteration. Whatever comes late for it is refused; waiting claims end with `DockError`."""

    def snapshot(self) -> DockSnapshot:
        """State of all live iterations with their payloads; rows under a lease count as not handed out."""

    def restore(self, snapshot: DockSnapshot) -> None:
        """Take over a snapshot; the dock must be empty and have the same columns and consumers."""

    def stats(self) -> dict[str, Any]:
        """State and totals, by name.

        `rows` {iteration: rows}, `rows_out` under a lease and `bytes` are of now; `bytes_put` and `wait_seconds`
        {consumer: seconds its claims waited} are since the start.
        """
