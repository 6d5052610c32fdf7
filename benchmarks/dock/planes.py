"""One driver for each way to move samples between processes: the dock, bare Ray (two ways), TransferQueue.

All get the same rows in the same puts, from the same processes. A plane's `produce` and `consume` run inside the
producing and consuming process; `clock` takes the seconds of each call. What a consumer must do to use the values is
the same for all: with `read`, every column's values are copied into one tensor of its own, as a training stage packs
a micro-batch, and summed, so that a plane whose `get` maps memory lazily pays for touching it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import psutil
import ray
import torch

from dock.workload import GROUP, SEQUENCES, TENSOR_COLUMNS, Columns
from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock
from mindspeed_rl.transfer_dock.spec import Claim

NAMES = tuple(TENSOR_COLUMNS)


@dataclass
class Clock:
    """Seconds spent in each kind of call."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


@dataclass(frozen=True)
class Batch:
    """What one put of the dock or TransferQueue holds."""

    rows: range
    columns: Columns


@dataclass(frozen=True)
class Turn:
    """What a consumer does: its share of the rows, `claim_rows` at a time, and whether it reads all values."""

    iteration: int
    share: int
    rows: int
    claim_rows: int
    read: bool


class Plane(Protocol):
    """One way to move samples. `prepare` is never timed; `produce` returns what Ray must carry to the consumers."""

    prepared: Any  # the values to put, by `prepare`

    def prepare(self, batches: Sequence[Batch], nbytes: int) -> None: ...

    def produce(self, iteration: int, clock: Clock) -> list[ray.ObjectRef]: ...

    def consume(self, turn: Turn, handed_over: list[ray.ObjectRef], clock: Clock) -> int: ...


def read_columns(columns: dict[str, Sequence[torch.Tensor]]) -> int:
    """Pack and sum every column; returns the sum of the token ids."""
    packed = {name: values.values if isinstance(values, Jagged) else values for name, values in columns.items()}
    parts = {name: [values] if isinstance(values, torch.Tensor) else list(values) for name, values in packed.items()}
    sums = {name: torch.cat(values).sum() for name, values in parts.items()}
    return int(sum(sums[name] for name in SEQUENCES if name in sums))


class RawRay:
    """The limit: every producer puts one array of its rows' bytes, packed beforehand, and every consumer gets one.

    No rows, columns, readiness or order; what it costs to pack is not counted.
    """

    def prepare(self, batches: Sequence[Batch], nbytes: int) -> None:
        self.prepared = np.arange(-(-nbytes // 8), dtype=np.int64)

    def produce(self, iteration: int, clock: Clock) -> list[ray.ObjectRef]:
        with clock("put"):
            return [ray.put(self.prepared)]

    def consume(self, turn: Turn, handed_over: list[ray.ObjectRef], clock: Clock) -> int:
        with clock("get"):
            array = ray.get(handed_over[0])
        if turn.read:
            with clock("read"):
                read_columns({"packed": [torch.from_numpy(array)]})
        return 0


class RayFromRows:
    """What Ray costs a stage that has rows, as stages do: each column concatenated, and one put of all columns.

    It concatenates into memory that it uses again. Consumers get packed columns: no rows, readiness or order here
    either.
    """

    def prepare(self, batches: Sequence[Batch], nbytes: int) -> None:
        rows = {name: [value for batch in batches for value in batch.columns[name]] for name in NAMES}
        rows |= {"prompt_ids": rows["prompt_ids"][::GROUP], "rewards": [torch.stack(rows["rewards"])]}
        self.prepared = {name: (values, torch.cat(values)) for name, values in rows.items()}

    def produce(self, iteration: int, clock: Clock) -> list[ray.ObjectRef]:
        with clock("put"):
            packed = {name: torch.cat(values, out=out).numpy() for name, (values, out) in self.prepared.items()}
            return [ray.put(packed)]

    def consume(self, turn: Turn, handed_over: list[ray.ObjectRef], clock: Clock) -> int:
        with clock("get"):
            packed = ray.get(handed_over[0])
        if not turn.read:
            return 0
        with clock("read"):
            return read_columns({name: [torch.from_numpy(values)] for name, values in packed.items()})


class Dock:
    """The product: put, claim, get, and every claim acknowledged.

    With `packed`, stages have each column as one tensor with lengths, packed beforehand; else as a list of tensors.
    """

    def __init__(self, dock: RayTransferDock, packed: bool):
        self._dock, self._packed = dock, packed

    def prepare(self, batches: Sequence[Batch], nbytes: int) -> None:
        self.prepared = [Batch(b.rows, _jagged(b.columns)) for b in batches] if self._packed else batches

    def produce(self, iteration: int, clock: Clock) -> list[ray.ObjectRef]:
        for batch in self.prepared:
            with clock("put"):
                self._dock.put(iteration, batch.rows, batch.columns)
        return []

    def consume(self, turn: Turn, handed_over: list[ray.ObjectRef], clock: Clock) -> int:
        total = 0
        while (claim := self._claim(turn, clock)) is not None:
            with clock("get"):
                values = self._dock.get(claim, NAMES)
            if turn.read:
                with clock("read"):
                    total += read_columns(values)
            with clock("ack"):
                self._dock.ack(claim)
        return total

    def _claim(self, turn: Turn, clock: Clock) -> Claim | None:
        with clock("claim"):
            return self._dock.claim("update", turn.iteration, turn.claim_rows, turn.share)


class TransferQueue:
    """PyPI `transferqueue`, its default backend and settings (SimpleStorage, two storage units).

    Puts are `kv_batch_put`, the interface that its manual names for several producers; a claim is `get_meta`, which
    hands ready samples out once, a get is `get_data`. Columns are its own native form, jagged nested tensors in a
    TensorDict, made beforehand: that conversion, 4 % of its time, is not counted. It has no order between consumers,
    no leases and no acknowledgement.
    """

    def __init__(self) -> None:
        import transfer_queue

        transfer_queue.init()
        self._queue, self._client = transfer_queue, transfer_queue.get_client()

    def prepare(self, batches: Sequence[Batch], nbytes: int) -> None:
        from tensordict import TensorDict

        self.prepared = [
            (
                [str(row) for row in batch.rows],
                TensorDict({name: _nested(batch.columns[name]) for name in NAMES}, batch_size=[len(batch.rows)]),
            )
            for batch in batches
        ]

    def produce(self, iteration: int, clock: Clock) -> list[ray.ObjectRef]:
        for keys, fields in self.prepared:
            with clock("put"):
                self._queue.kv_batch_put(keys=keys, partition_id=str(iteration), fields=fields)
        return []

    def consume(self, turn: Turn, handed_over: list[ray.ObjectRef], clock: Clock) -> int:
        total = 0
        for _ in range(turn.rows // turn.claim_rows):
            with clock("claim"):
                meta = self._client.get_meta(
                    data_fields=list(NAMES),
                    batch_size=turn.claim_rows,
                    partition_id=str(turn.iteration),
                    task_name="update",
                )
            with clock("get"):
                fields = self._client.get_data(meta)
            if turn.read:
                with clock("read"):
                    total += read_columns({name: [_flat(fields[name])] for name in NAMES})
        return total

    def clear(self, iteration: int) -> None:
        """Forget an iteration."""
        self._client.clear_partition(str(iteration))

    def controller_process(self) -> psutil.Process:
        """The process of its controller."""
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        return psutil.Process(ray.get(controller.__ray_call__.remote(lambda _: os.getpid())))

    def close(self) -> None:
        """End its controller and storage units."""
        self._queue.close()


def _jagged(columns: Columns) -> Columns:
    prompts = columns["prompt_ids"][::GROUP]
    pieces = np.arange(len(columns["prompt_ids"])) // GROUP
    return {
        "prompt_ids": Jagged(torch.cat(prompts), [len(prompt) for prompt in prompts], pieces),
        "rewards": columns["rewards"],
        **{
            name: Jagged(torch.cat(columns[name]), [len(values) for values in columns[name]])
            for name in NAMES
            if name not in ("prompt_ids", "rewards")
        },
    }


def _nested(values: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.values() if values.is_nested else values
