"""Checksums of weights: equal if and, but for chance, only if two tensors have the same bits in the same places.

The checksum of a tensor is the sum over its elements of their bits, as an integer, times a weight that depends on the
element's position alone, modulo 2^64. Sums can be taken in any order and over any parts, so that every rank sums over
its own rows, and one all-reduce gives the checksum of the whole. Weights are odd: no change of a single element goes
unseen. They are spread over all 64 bits (by the finaliser of Steele et al. 2014, "Fast Splittable Pseudorandom Number
Generators"), so that elements which change places or cancel out are found but for a chance of about 2^-64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import parameter_table

CHUNK = 1 << 20  # elements at a time: bounds the memory of the integers
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of so many bytes
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # as signed 64-bit numbers


def _weights(positions: torch.Tensor) -> torch.Tensor:
    """An odd number for each position."""

    def shifted(values: torch.Tensor, count: int) -> torch.Tensor:
        """Right shift of unsigned numbers."""
        return (values >> count) & ((1 << (64 - count)) - 1)

    mixed = (positions + 1) * _GOLDEN
    mixed = (mixed ^ shifted(mixed, 30)) * _MIX_1
    mixed = (mixed ^ shifted(mixed, 27)) * _MIX_2
    return (mixed ^ shifted(mixed, 31)) | 1


def checksum(values: torch.Tensor, width: int | None = None, row: int = 0, column: int = 0) -> torch.Tensor:
    """Scalar int64 of a tensor, or of a part of one.

    Args:
        values: [rows, columns] or [rows].
        width: columns of the whole tensor; None: those of `values`.
        row: of the whole tensor that the first one of `values` is.
        column: likewise.
    """
    bits = values.detach().view(BITS[values.element_size()])
    bits = bits if bits.dim() == 2 else bits.reshape(len(bits), -1)
    width = width or bits.shape[1]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    columns = torch.arange(column, column + bits.shape[1], device=values.device)
    rows_at_once = max(1, CHUNK // max(1, bits.shape[1]))
    for first in range(0, len(bits), rows_at_once):
        part = bits[first : first + rows_at_once]
        rows = torch.arange(row + first, row + first + len(part), device=values.device)
        total += (part.long() * _weights(rows[:, None] * width + columns)).sum()
    return total


def with_checksums(
    weights: Iterable[tuple[str, torch.Tensor]], found: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hand `weights` on, and put the checksum of each into `found` at that moment."""
    for name, tensor in weights:
        found[name] = checksum(tensor)
        yield name, tensor


def training_checksums(
    local_params: Mapping[str, torch.Tensor],
    model: ModelConfig,
    layout: WeightLayout,
    rank: int,
    replica_group: dist.ProcessGroup | None,
) -> dict[str, int]:
    """Checksums of all Hugging Face tensors, from the shards of the ranks that hold all weights together.

    Args:
        local_params: this rank's shards by Megatron name.
        model: shape of the model.
        layout: of the shards.
        rank: this one.
        replica_group: those ranks (see `export.Groups`), all of which call this; None: this rank holds everything.
    """
    tp_rank, pp_rank, replica = layout.coordinates(rank)
    ep_rank = layout.expert_rank(replica)
    names = [name for parameter in parameter_table(model) for name in parameter.hf_names]
    index_of = {name: index for index, name in enumerate(names)}
    device = next(iter(local_params.values())).device
    sums = torch.zeros(len(names), dtype=torch.int64, device=device)
    for name, parameter in layout.owned(model, pp_rank, ep_rank).items():
        is_copy = (tp_rank > 0 and parameter.tp_dim is None) or (ep_rank > 0 and parameter.expert is None)
        if is_copy:  # another rank of the group counts it
            continue
        elements = local_params[name].detach().reshape(-1)
        for slab in parameter.slabs(tp_rank, layout.tp):
            sums[index_of[slab.name]] += checksum(slab.of_shard(elements), prod(slab.shape[1:]), *slab.offsets)
    if replica_group is not None:
        dist.all_reduce(sums, group=replica_group)
    return dict(zip(names, sums.tolist(), strict=True))


def differing(expected: Mapping[str, int], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose checksums are not equal, or that only one of the two has."""
    values = torch.stack([value.cpu() for value in found.values()]).tolist() if found else []
    got = dict(zip(found, values, strict=True))
    return sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
