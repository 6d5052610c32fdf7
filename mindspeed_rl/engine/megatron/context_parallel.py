"""Context parallelism after DeepSpeed-Ulysses (arXiv:2309.14509): ranks share tokens, and for attention heads.

Each rank has an equal contiguous part of a packed micro-batch's tokens, wherever sequences begin and end. For
attention an all-to-all gives it all tokens of its part of the heads, and another one takes the result back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all


def tokens_to_heads(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T/cp, H, d] of this rank's tokens to [T, H/cp, d] of its heads; fewer heads than ranks are repeated first."""
    cp = group.size()
    if hidden.shape[1] < cp:
        hidden = hidden.repeat_interleave(cp // hidden.shape[1], dim=1)
    by_rank = hidden.unflatten(1, (cp, -1)).transpose(0, 1)  # [cp, T/cp, H/cp, d]: what each rank is to get
    return all_to_all(group, by_rank.contiguous()).flatten(0, 1)


def heads_to_tokens(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, H/cp, d] of this rank's heads to [T/cp, H, d] of its tokens."""
    of_all = all_to_all(group, hidden.unflatten(0, (group.size(), -1)))  # [cp, T/cp, H/cp, d]: from each rank
    return of_all.transpose(0, 1).flatten(1, 2)


def gather_tokens(places: torch.Tensor, total: int, group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """All [total] values of a micro-batch, of which this rank has those at `places`.

    The loss is taken to be the same on all ranks, as each computes it in full: a rank's gradient is that of its own
    values, nothing is added up.
    """
    gathered: torch.Tensor = _GatherTokens.apply(places, total, group, values)
    return gathered


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, places: torch.Tensor, total: int, group: dist.ProcessGroup, values: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        gathered = values.new_zeros(total)
        gathered[places] = values
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        (places,) = ctx.saved_tensors
        return None, None, None, gradient[places]
