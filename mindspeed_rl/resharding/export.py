"""Training weights as Hugging Face tensors on every rank, through bucketed collectives.

Stage by stage, a stage's shards are packed into flat byte buckets. A bucket goes from its stage to the other stages
(one broadcast over the pipeline group), then from every tensor-parallel rank to the others (one all-gather). In this
order the links between stages carry each byte once, not once a tensor-parallel rank.

Experts that expert-parallel ranks share have buckets of their own: a place in such a bucket holds another expert's
shard on each of those ranks, and the all-gather is over all ranks, of both kinds, that have the experts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import Parameter, Shape

ALIGNMENT = 16  # bytes; a multiple of every element size, so that each slot can be viewed in its own dtype


@dataclass(frozen=True)
class Topology:
    """This rank's place in the layout and the groups it talks to (None where the size is 1)."""

    layout: WeightLayout
    tp_rank: int = 0
    pp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    ep_rank: int = 0
    expert_group: dist.ProcessGroup | None = None  # tensor- times expert-parallel ranks, the former fastest


@dataclass(frozen=True)
class Slot:
    """A shard's place in a bucket."""

    parameters: tuple[Parameter, ...]  # whose shard it is; on each expert-parallel rank another's, where they differ
    dtype: torch.dtype
    shape: Shape  # of one shard
    offset: int = 0  # bytes

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape) * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The shard inside a bucket's bytes."""
        return flat[self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Shards of one pipeline stage that travel together."""

    stage: int
    slots: tuple[Slot, ...]
    is_expert_parallel: bool = False

    @property
    def nbytes(self) -> int:
        return _align(self.slots[-1].end)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan_export(
    local_params: Mapping[str, torch.Tensor], model: ModelConfig, topology: Topology, bucket_bytes: int
) -> list[Bucket]:
    """The buckets of an export: equal on every rank, to be reused while names, shapes and dtypes stay.

    A shard larger than `bucket_bytes` has a bucket of its own; the shards of any other bucket fit into that size, or
    into its part of expert-parallel ranks, which gather so many times as much.
    All ranks of the pipeline group call this together (one small object collective, for the dtypes).

    Raises:
        CheckpointError: a parameter of this stage is missing or has another shape than the model says.
    """
    layout = topology.layout
    mine = layout.owned(model, topology.pp_rank, topology.ep_rank)
    dtypes = _local_dtypes(local_params, mine, layout.tp)
    stage_dtypes = [dtypes]
    if topology.pp_group is not None:
        stage_dtypes = [{} for _ in layout.stages]
        dist.all_gather_object(stage_dtypes, dtypes, group=topology.pp_group)
    buckets: list[Bucket] = []
    for stage in range(layout.pp):
        dtypes = stage_dtypes[stage]
        owned = [list(layout.owned(model, stage, ep_rank).values()) for ep_rank in range(layout.ep)]
        shared = [(parameter,) for parameter in owned[0] if not layout.is_expert_parallel(parameter)]
        experts = zip(*([p for p in of_rank if layout.is_expert_parallel(p)] for of_rank in owned), strict=True)
        for of_experts, rows, limit in ((False, shared, bucket_bytes), (True, experts, bucket_bytes // layout.ep)):
            slots = [Slot(row, dtypes[_mine(row, topology).name], row[0].local_shape(layout.tp)) for row in rows]
            buckets += [Bucket(stage, packed, of_experts) for packed in _pack(slots, limit)]
    return buckets


def _mine(parameters: tuple[Parameter, ...], topology: Topology) -> Parameter:
    """Of a slot's parameters the one that this rank holds, or would hold in the slot's stage."""
    return parameters[topology.ep_rank if len(parameters) > 1 else 0]


def _pack(slots: Iterable[Slot], limit: int) -> Iterator[tuple[Slot, ...]]:
    """Slots end to end: as many at a time as `limit` bytes hold, or one that is larger."""
    packed: list[Slot] = []
    offset = 0
    for slot in slots:
        if packed and offset + slot.end > limit:
            yield tuple(packed)
            packed, offset = [], 0
        packed.append(replace(slot, offset=offset))
        offset = _align(packed[-1].end)
    if packed:
        yield tuple(packed)


def _local_dtypes(
    local_params: Mapping[str, torch.Tensor], owned: Mapping[str, Parameter], tp_size: int
) -> dict[str, torch.dtype]:
    missing = [name for name in owned if name not in local_params]
    if missing:
        raise CheckpointError(f"the model lacks {len(missing)} parameters of the name table: {', '.join(missing)}")
    for name, parameter in owned.items():
        found, expected = tuple(local_params[name].shape), parameter.local_shape(tp_size)
        if found != expected:
            raise CheckpointError(
                f"{name} has shape {found}, but the name table says {expected} at TP size {tp_size}"
            )
    return {name: local_params[name].dtype for name in owned}


def export_hf(
    local_params: Mapping[str, torch.Tensor], topology: Topology, plan: list[Bucket]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the Hugging Face checkpoint, in full, in the same order on every rank.

    All ranks iterate together and to the end: a bucket's collectives run when its first tensor is asked for.
    Beside the tensors handed out, (tensor-parallel size + 1) x one bucket of memory are in use. Tensors keep their
    dtype and device; they may be views of the parameters, so they are to be read or copied, not written.

    Args:
        local_params: this rank's shards by Megatron name, layers and experts counted in the whole model.
        plan: result of `plan_export` for parameters of these names, shapes and dtypes.
    """
    tp = topology.layout.tp
    for bucket in plan:
        if topology.pp_group is None and _group(bucket, topology) is None:
            for slot in bucket.slots:
                yield from slot.parameters[0].to_hf(local_params[slot.parameters[0].name].detach())
        else:
            gathered = _exchange(bucket, local_params, topology)
            for slot in bucket.slots:
                for ep_rank, parameter in enumerate(slot.parameters):
                    shards = gathered[ep_rank * tp : (ep_rank + 1) * tp]
                    yield from parameter.shards_to_hf([slot.view(flat) for flat in shards])
            del gathered, shards  # before the next bucket is allocated


def _group(bucket: Bucket, topology: Topology) -> dist.ProcessGroup | None:
    """The ranks that hold a bucket's parameters together."""
    return topology.expert_group if bucket.is_expert_parallel else topology.tp_group


def _exchange(bucket: Bucket, local_params: Mapping[str, torch.Tensor], topology: Topology) -> list[torch.Tensor]:
    """The bucket's bytes of every rank of its group."""
    device = next(iter(local_params.values())).device
    mine = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
    if bucket.stage == topology.pp_rank:
        for slot in bucket.slots:
            slot.view(mine).copy_(local_params[_mine(slot.parameters, topology).name].detach())
    if topology.pp_group is not None:
        source = dist.get_global_rank(topology.pp_group, bucket.stage)
        dist.broadcast(mine, source, group=topology.pp_group)
    group = _group(bucket, topology)
    if group is None:
        return [mine]
    size = group.size()
    gathered = torch.empty(size * bucket.nbytes, dtype=torch.uint8, device=device)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    all_gather(gathered, mine, group=group)
    return list(gathered.chunk(size))
