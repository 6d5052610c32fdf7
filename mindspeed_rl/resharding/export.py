"""Training weights as Hugging Face tensors on the ranks that need them: carries a plan out.

Two buckets are in use: while the tensors of one are put together and handed out, the collectives of the next one run.
On a device they are queued on a side stream; on the CPU they run in threads of the backend, and the second of two
starts when the first is seen to be complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.device.base import Device
from mindspeed_rl.resharding.plan import Bucket, Collective, ExportPlan, Piece


@dataclass(frozen=True)
class Groups:
    """The process groups that a plan's collectives name; None where a rank is alone."""

    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None  # tensor- times expert-parallel ranks, the former fastest
    replica: dist.ProcessGroup | None = None  # those of all stages, stages slowest: all weights exactly once


def export_hf(
    local_params: Mapping[str, torch.Tensor], plan: ExportPlan, groups: Groups, device: Device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the Hugging Face checkpoint that `plan` brings to this rank, each in full.

    All ranks iterate together and to the end. Tensors keep their dtype and device; they may be views of the
    parameters, so they are to be read or copied, not written. Beside what the consumer keeps, `plan.peak_bytes` of
    memory are in use.

    Args:
        local_params: this rank's shards by Megatron name, layers and experts counted in the whole model; those that
            `check_parameters` lets pass. What it makes when it is asked lives as long as a bucket.
        plan: of this rank.
        groups: what the plan's collectives run over.
        device: where the shards are.
    """
    buffers = [torch.empty(size, dtype=torch.uint8, device=device.current()) for size in plan.buffer_bytes]
    stream = device.side_stream()

    def start(number: int) -> _Transfer | None:
        if number == len(plan.buckets):
            return None
        return _Transfer(plan.buckets[number], local_params, groups, buffers[number % 2], device, stream)

    following = start(0)
    for parameter in plan.local:
        yield from parameter.to_hf(local_params[parameter.name].detach())
    tensors: dict[str, list[torch.Tensor]] = {}  # of parameters that are being put together
    for number, bucket in enumerate(plan.buckets):
        assert following is not None
        arrived = following.finish()
        following = start(number + 1)
        for piece in bucket.received:
            parameter = piece.parameter
            if piece.rows.start == 0:
                tensors[parameter.name] = [
                    torch.empty(shape, dtype=piece.dtype, device=arrived.device) for shape in parameter.hf_shapes
                ]
            _place(piece, arrived, tensors[parameter.name])
            if plan.completes(piece):
                yield from zip(parameter.hf_names, tensors[parameter.name], strict=True)
                del tensors[parameter.name]
            if following is not None:
                following.proceed()


def check_parameters(local_params: Mapping[str, torch.Tensor], plan: ExportPlan) -> None:
    """Check that this rank's shards are those that the plan was made for.

    Raises:
        CheckpointError: a parameter is missing, or has another shape or dtype.
    """
    missing = [name for name in plan.owned if name not in local_params]
    if missing:
        raise CheckpointError(f"the model lacks {len(missing)} parameters of the name table: {', '.join(missing)}")
    for name, parameter in plan.owned.items():
        found, expected = tuple(local_params[name].shape), parameter.local_shape(plan.layout.tp)
        if found != expected:
            raise CheckpointError(
                f"{name} has shape {found}, but the name table says {expected} at TP size {plan.layout.tp}"
            )
        if local_params[name].dtype != plan.dtypes[name]:
            raise CheckpointError(f"{name} is {local_params[name].dtype}, but was planned as {plan.dtypes[name]}")


class _Transfer:
    """A bucket on its way."""

    def __init__(
        self,
        bucket: Bucket,
        local_params: Mapping[str, torch.Tensor],
        groups: Groups,
        buffer: torch.Tensor,
        device: Device,
        stream: Any,
    ):
        self._device, self._stream = device, stream
        mine, gathered = buffer[: bucket.send_bytes], buffer[bucket.send_bytes : bucket.nbytes]
        self._arrived = gathered if bucket.collectives[-1].way != "broadcast" else mine
        with device.queue_on(stream):
            into = [piece.views(mine)[0] for piece in bucket.sent]
            if into:
                shards = [local_params[piece.parameter.name].detach() for piece in bucket.sent]
                rows = [s[p.rows.start : p.rows.stop] for s, p in zip(shards, bucket.sent, strict=True)]
                torch._foreach_copy_(into, rows)
            self._steps = (_start(collective, groups, mine, gathered) for collective in bucket.collectives)
            self._work: Any = next(self._steps)
            if stream is not None:  # waiting only orders streams: all can be queued at once
                self._wait()

    def proceed(self) -> None:
        """Start the next collective if one is complete."""
        while self._work is not None and self._work.is_completed():
            self._next()

    def _next(self) -> None:
        self._work.wait()
        self._work = next(self._steps, None)

    def _wait(self) -> None:
        while self._work is not None:
            self._next()

    def finish(self) -> torch.Tensor:
        """What has arrived, to be used on the current stream."""
        self._wait()
        self._device.wait_stream(self._stream)
        return self._arrived


def _start(collective: Collective, groups: Groups, mine: torch.Tensor, gathered: torch.Tensor) -> Any:
    """Start a collective; returns what it can be waited for with."""
    group: dist.ProcessGroup | None = getattr(groups, collective.group)
    assert group is not None, f"the plan has a collective over {collective.ranks}"
    assert group.size() == len(collective.ranks), f"the plan has a collective over {collective.ranks}"
    if collective.way == "broadcast":
        return dist.broadcast(mine, collective.ranks[collective.root], group=group, async_op=True)
    if collective.way == "all_gather":
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        return all_gather(gathered, mine, group=group, async_op=True)
    return dist.all_to_all_single(
        gathered, mine, list(collective.receives), list(collective.sends), group=group, async_op=True
    )


def _place(piece: Piece, arrived: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy the rows of a piece to where they belong in the parameter's Hugging Face tensors."""
    by_name = dict(zip(piece.parameter.hf_names, tensors, strict=True))
    start = piece.rows.start * prod(piece.shape[1:])
    into, parts = [], []
    for rows, slabs in zip(piece.views(arrived), piece.slabs, strict=True):
        into += [slab.of_tensor(by_name[slab.name]) for slab in slabs]
        parts += [slab.of_shard(rows.view(-1), start) for slab in slabs]
    if into:  # rows that pad the vocabulary are of no tensor
        torch._foreach_copy_(into, parts)
