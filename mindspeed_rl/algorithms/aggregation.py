"""From per-token values to one number, the same however the tokens are split up.

Each token's weight depends only on counts of the global mini-batch, so that the sum over micro-batches and
data-parallel ranks of what `aggregate` returns is exactly the global value, and gradients add up likewise.
The formulas, with m the mask, T counted tokens, S sequences with a counted token, n_s counted tokens of sequence s:

    token-mean              Σ m·v / T
    seq-mean-token-sum      Σ_s Σ_t m·v / S
    seq-mean-token-mean     Σ_s (Σ_t m·v / n_s) / S
    seq-mean-token-sum-norm Σ_s Σ_t m·v / (S·horizon)

Where a data-parallel engine averages gradients instead of adding them, it must multiply by the number of ranks.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mindspeed_rl.types import Denominators

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def counted_tokens(mask: Tensor, response_lengths: Tensor) -> Tensor:
    """Counted tokens of each sequence, [B] float32."""
    return sum_by_sequence((mask > 0).float(), response_lengths)


def count(mask: Tensor, response_lengths: Tensor) -> Denominators:
    """Sizes of these sequences. The sum over data-parallel ranks gives the global denominators.

    Args:
        mask: [R] 0/1.
        response_lengths: [B] int64.
    """
    per_sequence = counted_tokens(mask, response_lengths)
    return Denominators(tokens=float((mask > 0).sum()), sequences=float((per_sequence > 0).sum()))


def token_weights(
    mask: Tensor,
    response_lengths: Tensor,
    mode: AggregationMode,
    denominators: Denominators,
    horizon: float | None = None,
) -> Tensor:
    """Weight of every token in the global value, [R] float32; arguments and errors as in `aggregate`."""
    counted = (mask > 0).float()
    # with nothing to count in the whole mini-batch every numerator is 0, and so must be the result
    tokens, sequences = denominators.tokens or 1.0, denominators.sequences or 1.0
    if mode == "token-mean":
        return counted / tokens
    if mode == "seq-mean-token-sum":
        return counted / sequences
    if mode == "seq-mean-token-mean":
        per_sequence = sum_by_sequence(counted, response_lengths).clamp(min=1)
        lengths = response_lengths.to(mask.device)
        return counted / (per_sequence.repeat_interleave(lengths) * sequences)
    if mode == "seq-mean-token-sum-norm":
        if horizon is None or horizon <= 0:
            raise ValueError(f"horizon = {horizon}: {mode} needs a positive constant, e.g. the longest response")
        return counted / (sequences * horizon)
    raise ValueError(f"mode = {mode!r} is unknown; known: {', '.join(get_args(AggregationMode))}")


def aggregate(
    values: Tensor,
    mask: Tensor,
    response_lengths: Tensor,
    mode: AggregationMode,
    denominators: Denominators,
    horizon: float | None = None,
) -> Tensor:
    """This micro-batch's share of the global value. Sequences must be whole: all tokens of one are in `values`.

    Args:
        values: [R] float; ignored where the mask is 0, even if not finite.
        mask: [R] 0/1.
        response_lengths: [B] int64.
        mode: see the module.
        denominators: of the global mini-batch.
        horizon: constant length of seq-mean-token-sum-norm, in tokens.

    Returns:
        Scalar with the gradient of `values`.

    Raises:
        ValueError: an unknown mode, or no horizon where the mode needs one.
    """
    weights = token_weights(mask, response_lengths, mode, denominators, horizon)
    return (torch.where(mask > 0, values, 0.0) * weights).sum()


def sum_by_sequence(values: Tensor, response_lengths: Tensor) -> Tensor:
    """[R] -> [B]: sum of `values` over each sequence."""
    lengths = response_lengths.to(values.device)
    index = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths)
    return values.new_zeros(len(lengths)).index_add(0, index, values)
