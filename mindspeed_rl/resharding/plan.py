"""What an export of training weights moves, worked out before any process exists: collectives, sizes, memory.

Stage by stage, parameters take the shortest of these ways to the ranks that need them:

- a rank holds them whole, and so does every other: nothing moves, the consumer gets views;
- they are whole on the ranks of one pipeline stage: one broadcast over the stages;
- tensor-parallel ranks hold slices: a broadcast, then an all-gather over those ranks. In this order the links between
  stages carry each byte once, not once a tensor-parallel rank;
- expert-parallel ranks share the experts: the same, with an all-gather over all ranks that have them together;
- rollout ranks keep whole experts, each its own: one all-to-all that takes an expert only where it is needed.

Small parameters share a bucket; one that does not fit is cut between rows, and goes on in the next bucket. The same
numbers on every rank of a group make the same buckets, so nothing has to be agreed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Literal

import torch

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.resharding.layout import RolloutLayout, WeightLayout
from mindspeed_rl.resharding.names import Parameter, Shape, Slab, parameter_table

ALIGNMENT = 16  # bytes; a multiple of every element size, so that each piece can be viewed in its own dtype
Ways = Literal["broadcast", "all_gather", "all_to_all"]
GroupName = Literal["pipeline", "tensor", "expert", "replica"]
Dtypes = Mapping[str, torch.dtype]  # of parameters, by Megatron name


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank of its group sees it."""

    way: Ways
    group: GroupName  # see `Groups` of export.py
    ranks: tuple[int, ...]  # of the group, numbers in the world
    sends: tuple[int, ...]  # bytes for each of them; for itself, what stays
    receives: tuple[int, ...]  # bytes from each of them
    root: int = 0  # of a broadcast: position in the group

    def to_others(self, rank: int) -> int:
        """Bytes that leave rank `rank`, which sees the collective so."""
        return sum(size for other, size in zip(self.ranks, self.sends, strict=True) if other != rank)

    def from_others(self, rank: int) -> int:
        """Bytes that arrive there."""
        return sum(size for other, size in zip(self.ranks, self.receives, strict=True) if other != rank)


@dataclass(frozen=True)
class Piece:
    """The same rows of a parameter's shards in a buffer."""

    parameter: Parameter
    rows: range
    shape: Shape  # of the rows of one shard
    dtype: torch.dtype
    offsets: tuple[int, ...]  # bytes, of each tensor-parallel rank's shard; one where they all hold the same

    @cached_property
    def slabs(self) -> list[list[Slab]]:
        """The rectangles of each shard's rows; worked out once, as a plan is carried out many times."""
        width, shards = prod(self.shape[1:]), len(self.offsets)
        start, stop = self.rows.start * width, self.rows.stop * width
        return [list(self.parameter.slabs(tp_rank, shards, start, stop)) for tp_rank in range(shards)]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each shard, [rows, …], in the bytes of a buffer."""
        size = prod(self.shape) * self.dtype.itemsize
        return [flat[start : start + size].view(self.dtype).view(self.shape) for start in self.offsets]


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel together. After a broadcast alone, what arrives is in the send buffer."""

    stage: int
    collectives: tuple[Collective, ...]
    sent: tuple[Piece, ...]  # what this rank puts into its send buffer
    received: tuple[Piece, ...]
    send_bytes: int  # size of the buffers
    receive_bytes: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes on this rank."""
        return self.send_bytes + self.receive_bytes


@dataclass(frozen=True)
class ExportPlan:
    """What rank `rank` of the training layout does in an export. Equal groups of ranks have equal buckets.

    Extra memory, beside parameters and what the consumer keeps: two buckets (one is emptied while the next one is
    under way), and the Hugging Face tensors of one parameter, which consumers take in full; where an expert of each
    expert-parallel rank is cut between two buckets, those of all of them.
    """

    layout: WeightLayout
    rank: int
    local: tuple[Parameter, ...]  # whole on this rank
    buckets: tuple[Bucket, ...]
    dtypes: Dtypes = field(repr=False)
    owned: Mapping[str, Parameter] = field(repr=False)  # what this rank has shards of

    @property
    def hf_names(self) -> list[str]:
        """Names of the tensors that the export yields, in their order."""
        whole = [piece.parameter for bucket in self.buckets for piece in bucket.received if self.completes(piece)]
        return [name for parameter in (*self.local, *whole) for name in parameter.hf_names]

    def completes(self, piece: Piece) -> bool:
        """True if it is the last one of its parameter."""
        return piece.rows.stop == piece.parameter.local_shape(self.layout.tp)[0]

    @property
    def sent_bytes(self) -> int:
        """Payload that leaves this rank, once for each rank that it is for."""
        return sum(c.to_others(self.rank) for bucket in self.buckets for c in bucket.collectives)

    @property
    def received_bytes(self) -> int:
        """Payload that arrives from other ranks."""
        return sum(c.from_others(self.rank) for bucket in self.buckets for c in bucket.collectives)

    @property
    def buffer_bytes(self) -> tuple[int, ...]:
        """Sizes of the buffers: for buckets of even number, and of odd."""
        sizes = [max((bucket.nbytes for bucket in self.buckets[parity::2]), default=0) for parity in (0, 1)]
        return tuple(size for size in sizes if size)

    @property
    def peak_bytes(self) -> int:
        """Largest extra memory, if the consumer keeps nothing."""
        tensors = max((self.hf_bytes(p) for p in self.local if p.transform == "qkv"), default=0)  # others are views
        begun = 0
        for piece in (piece for bucket in self.buckets for piece in bucket.received):
            begun += self.hf_bytes(piece.parameter) if piece.rows.start == 0 else 0
            tensors = max(tensors, begun)
            begun -= self.hf_bytes(piece.parameter) if self.completes(piece) else 0
        return sum(self.buffer_bytes) + tensors

    def hf_bytes(self, parameter: Parameter) -> int:
        """Of all Hugging Face tensors of a parameter."""
        return prod(parameter.shape) * self.dtypes[parameter.name].itemsize

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def planned_dtypes(cfg: MegatronConfig, model: ModelConfig) -> dict[str, torch.dtype]:
    """Of every parameter of the actor, by Megatron name."""
    dtype = torch.bfloat16 if cfg.bf16 else torch.float32
    return {p.name: torch.float32 if p.is_float32 else dtype for p in parameter_table(model)}


def make_plan(
    model: ModelConfig,
    dtypes: Dtypes,
    layout: WeightLayout,
    rank: int,
    bucket_bytes: int,
    rollout: RolloutLayout | None = None,
) -> ExportPlan:
    """The part of rank `rank` in an export: a pure function, for any rank of any layout.

    Args:
        model: shape of the model.
        dtypes: of all its parameters, by Megatron name.
        layout: of the training weights.
        rank: in the world.
        bucket_bytes: most bytes that a bucket takes on a rank, its send and receive buffer together; one row of each
            shard goes into a bucket however small it is.
        rollout: where the tensors are to be; None: all of them on every rank.
    """
    return _Planner(model, dtypes, layout, rank, bucket_bytes, rollout or RolloutLayout()).plan()


@dataclass(frozen=True)
class _Unit:
    """Shards that take the same place on the ranks that hold them: one parameter, or an expert of each rank."""

    parameters: tuple[Parameter, ...]  # by expert-parallel rank, where it matters
    dtype: torch.dtype
    shape: Shape  # of one shard
    copies: tuple[int, ...]  # how often it is in the buffers of a rank: all ranks of the group, or one for all

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize


_Load = list[tuple[_Unit, range]]  # of a bucket: units, and which of their rows


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _loads(units: Iterable[_Unit], limit: int) -> Iterator[_Load]:
    """Fill buckets with rows until one more would take more than `limit` bytes on some rank."""
    load: _Load = []
    used: list[int] = []
    for unit in units:
        row, rows = 0, unit.shape[0]
        while row < rows:
            used = used or [0] * len(unit.copies)
            room = min((limit - taken) // n for taken, n in zip(used, unit.copies, strict=True) if n)
            fitting = room // ALIGNMENT * ALIGNMENT // unit.row_bytes
            if fitting < 1 and load:
                yield load
                load, used = [], []
                continue
            taken_rows = range(row, min(rows, row + max(fitting, 1)))
            load.append((unit, taken_rows))
            size = _align(len(taken_rows) * unit.row_bytes)
            used = [taken + n * size for taken, n in zip(used, unit.copies, strict=True)]
            row = taken_rows.stop
    if load:
        yield load


class _Planner:
    """The steps of `make_plan`, which see its arguments."""

    def __init__(
        self,
        model: ModelConfig,
        dtypes: Dtypes,
        layout: WeightLayout,
        rank: int,
        bucket_bytes: int,
        rollout: RolloutLayout,
    ):
        self.model, self.dtypes, self.layout, self.rank = model, dtypes, layout, rank
        self.limit, self.rollout = bucket_bytes, rollout
        self.tp_rank, self.pp_rank, self.replica = layout.coordinates(rank)
        self.ep_rank = layout.expert_rank(self.replica)
        tp, first = range(layout.tp), self.replica - self.ep_rank
        self.groups: dict[GroupName, tuple[int, ...]] = {
            "pipeline": tuple(layout.rank(self.tp_rank, stage, self.replica) for stage in range(layout.pp)),
            "tensor": tuple(layout.rank(t, self.pp_rank, self.replica) for t in tp),
            "expert": tuple(layout.rank(t, self.pp_rank, first + e) for e in range(layout.ep) for t in tp),
            "replica": tuple(
                layout.rank(t, stage, first + e) for stage in range(layout.pp) for e in range(layout.ep) for t in tp
            ),
        }
        self.needed = {other: rollout.experts(model, other) for other in self.groups["replica"]}

    def plan(self) -> ExportPlan:
        local: list[Parameter] = []
        buckets: list[Bucket] = []
        for stage in range(self.layout.pp):
            here, moved = self._stage(stage)
            local += here
            buckets += moved
        owned = self.layout.owned(self.model, self.pp_rank, self.ep_rank)
        return ExportPlan(self.layout, self.rank, tuple(local), tuple(buckets), self.dtypes, owned)

    def _stage(self, stage: int) -> tuple[list[Parameter], list[Bucket]]:
        layout = self.layout
        owned = [list(layout.owned(self.model, stage, ep_rank).values()) for ep_rank in range(layout.ep)]
        apart = self.rollout.expert_parallel  # experts go their own ways
        alike = [p for p in owned[0] if p.expert is None or not (apart or layout.ep > 1)]
        experts = list(zip(*([p for p in of_rank if p.expert is not None] for of_rank in owned), strict=True))
        whole = [(p,) for p in alike if layout.tp == 1 or p.tp_dim is None]
        cut = [(p,) for p in alike if not (layout.tp == 1 or p.tp_dim is None)]
        local = [p for (p,) in whole] if layout.pp == 1 else []
        buckets = self._gathered(stage, whole, None) if layout.pp > 1 else []
        buckets += self._gathered(stage, cut, "tensor")
        if apart and self._experts_stay():
            here = self.layout.owned(self.model, stage, self.ep_rank).values()
            local += [p for p in here if p.expert is not None and self._needs(self.rank, p)]
        elif apart:
            buckets += self._exchanged(stage, experts)
        elif layout.ep > 1:
            buckets += self._gathered(stage, experts, "expert")
        return local, buckets

    def _needs(self, rank: int, parameter: Parameter) -> bool:
        return parameter.expert in self.needed[rank]

    def _experts_stay(self) -> bool:
        """Every rank of the replica has the experts that it needs, whole."""
        layout = self.layout

        def holds(rank: int) -> range:
            return layout.experts(self.model, layout.expert_rank(layout.coordinates(rank)[2]))

        return layout.tp == layout.pp == 1 and all(
            set(needed) <= set(holds(rank)) for rank, needed in self.needed.items()
        )

    def _unit(self, parameters: tuple[Parameter, ...], copies: tuple[int, ...]) -> _Unit:
        first = parameters[0]
        return _Unit(parameters, self.dtypes[first.name], first.local_shape(self.layout.tp), copies)

    def _piece(self, unit: _Unit, rows: range, ep_rank: int, offsets: tuple[int, ...]) -> Piece:
        parameter = unit.parameters[ep_rank if len(unit.parameters) > 1 else 0]
        return Piece(parameter, rows, (len(rows), *unit.shape[1:]), unit.dtype, offsets)

    def _gathered(
        self, stage: int, rows: Iterable[tuple[Parameter, ...]], name: Literal["tensor", "expert"] | None
    ) -> list[Bucket]:
        """Buckets that all ranks need in full: from their stage to the others, then from all ranks of a group."""
        group = self.groups[name] if name else ()
        units = (self._unit(row, (1 + len(group),)) for row in rows)
        return [self._gathered_bucket(stage, load, name) for load in _loads(units, self.limit)]

    def _gathered_bucket(self, stage: int, load: _Load, name: Literal["tensor", "expert"] | None) -> Bucket:
        tp = self.layout.tp
        *starts, size = accumulate((_align(len(rows) * unit.row_bytes) for unit, rows in load), initial=0)
        sent, received = [], []
        for (unit, rows), start in zip(load, starts, strict=True):
            if stage == self.pp_rank:
                sent.append(self._piece(unit, rows, self.ep_rank, (start,)))
            for ep_rank in range(len(unit.parameters)):
                shards = range(ep_rank * tp, ep_rank * tp + tp) if name else range(1)
                received.append(self._piece(unit, rows, ep_rank, tuple(shard * size + start for shard in shards)))
        collectives = []
        if self.layout.pp > 1:
            group = self.groups["pipeline"]
            is_root = stage == self.pp_rank
            sends = tuple(size if is_root else 0 for _ in group)
            receives = tuple(size if number == stage else 0 for number in range(len(group)))
            collectives.append(Collective("broadcast", "pipeline", group, sends, receives, root=stage))
        if name:
            group = self.groups[name]
            sizes = (size,) * len(group)
            collectives.append(Collective("all_gather", name, group, sizes, sizes))
        total = size * len(self.groups[name]) if name else 0
        return Bucket(stage, tuple(collectives), tuple(sent), tuple(received), size, total)

    def _exchanged(self, stage: int, rows: Iterable[tuple[Parameter, ...]]) -> list[Bucket]:
        """Buckets of experts, each of which goes to the ranks that need it."""
        group, tp = self.groups["replica"], self.layout.tp

        def copies(row: tuple[Parameter, ...]) -> tuple[int, ...]:
            readers = [sum(self._needs(rank, parameter) for rank in group) for parameter in row]
            read = [tp * sum(self._needs(rank, parameter) for parameter in row) for rank in group]
            places = [self._place(rank) for rank in group]
            sent = [readers[ep_rank] if of_stage == stage else 0 for _, of_stage, ep_rank in places]
            return tuple(a + b for a, b in zip(sent, read, strict=True))

        units = (unit for row in rows if any((unit := self._unit(row, copies(row))).copies))
        return [self._exchanged_bucket(stage, load) for load in _loads(units, self.limit)]

    def _place(self, rank: int) -> tuple[int, int, int]:
        """Its tensor-parallel rank, stage and expert-parallel rank."""
        tp_rank, stage, replica = self.layout.coordinates(rank)
        return tp_rank, stage, self.layout.expert_rank(replica)

    def _exchanged_bucket(self, stage: int, load: _Load) -> Bucket:
        group, tp = self.groups["replica"], self.layout.tp

        def sizes(source: int, reader: int) -> list[int]:
            """Bytes of each unit that one rank sends to another."""
            _, of_stage, ep_rank = self._place(source)
            return [
                _align(len(rows) * unit.row_bytes)
                if of_stage == stage and self._needs(reader, unit.parameters[ep_rank])
                else 0
                for unit, rows in load
            ]

        def starts(parts: list[list[int]]) -> tuple[list[list[int]], int]:
            """Where each part of each row begins, if all follow each other, and where the last one ends."""
            found, end = [], 0
            for row in parts:
                *begin, end = accumulate(row, initial=end)
                found.append(begin)
            return found, end

        outgoing = [sizes(self.rank, reader) for reader in group]
        incoming = [sizes(source, self.rank) for source in group]
        (send_starts, send_bytes), (receive_starts, receive_bytes) = starts(outgoing), starts(incoming)
        sent = [
            self._piece(*load[index], self.ep_rank, (send_starts[reader][index],))
            for reader, row in enumerate(outgoing)
            for index, size in enumerate(row)
            if size
        ]
        received = []
        for index, (unit, rows) in enumerate(load):
            for ep_rank, parameter in enumerate(unit.parameters):
                if self._needs(self.rank, parameter):
                    first = (stage * self.layout.ep + ep_rank) * tp
                    offsets = tuple(receive_starts[source][index] for source in range(first, first + tp))
                    received.append(self._piece(unit, rows, ep_rank, offsets))
        collective = Collective(
            "all_to_all", "replica", group, tuple(sum(row) for row in outgoing), tuple(sum(row) for row in incoming)
        )
        return Bucket(stage, (collective,), tuple(sent), tuple(received), send_bytes, receive_bytes)


def _lines(plan: ExportPlan) -> Iterator[str]:
    layout = plan.layout
    tp_rank, stage, replica = layout.coordinates(plan.rank)
    place = f"TP {tp_rank}/{layout.tp}, PP {stage}/{layout.pp}, replica {replica}/{layout.dp}"
    yield f"rank {plan.rank} of {layout.world} ({place}{f', EP {layout.ep}' if layout.ep > 1 else ''})"
    if plan.local:
        yield f"  here: {len(plan.local)} parameters, {_mib(sum(map(plan.hf_bytes, plan.local)))}, nothing moves"
    kinds: dict[tuple[int, tuple[tuple[Ways, tuple[int, ...]], ...]], list[Bucket]] = {}
    for bucket in plan.buckets:
        ways = tuple((collective.way, collective.ranks) for collective in bucket.collectives)
        kinds.setdefault((bucket.stage, ways), []).append(bucket)
    for (stage, ways), buckets in kinds.items():
        names = " -> ".join(f"{way} over ranks {', '.join(map(str, ranks))}" for way, ranks in ways)
        count = sum(plan.completes(piece) for bucket in buckets for piece in bucket.received)
        largest = max(bucket.nbytes for bucket in buckets)
        yield f"  stage {stage}: {len(buckets)} x [{names}]: {count} parameters, buckets up to {_mib(largest)}"
    yield (
        f"  sends {_mib(plan.sent_bytes)}, receives {_mib(plan.received_bytes)}; "
        f"extra memory {_mib(plan.peak_bytes)}: buffers {' + '.join(map(_mib, plan.buffer_bytes)) or 'none'}, "
        "and the tensors of one parameter"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
