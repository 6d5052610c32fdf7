"""KL to the reference over the whole vocabulary, from logits whose vocabulary is split over tensor-parallel ranks.

Logits of the reference exist for a chunk of rows at a time: they are made of its hidden states, which are small, in
the forward pass and again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_rl.algorithms.log_probs import all_reduce, check_logits, real_columns, row_chunks, scaled_copy


def vocab_parallel_kl(
    logits: Tensor,
    hidden: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """KL(p ‖ q) = Σ_j p_j (log p_j − log q_j) of every row, over the real vocabulary.

    p = softmax(logits / temperature) is the policy, q = softmax(hidden · weightᵀ / temperature) the reference, a
    constant. The gradient is exact: ∂KL/∂z_j = p_j (log p_j − log q_j − KL) with z = logits / temperature; nothing of
    it is estimated from the token that was sampled. Of equal logits KL and gradient are exactly 0, rounding included.
    The loss is taken to be the same on all ranks of `group`: a rank's gradient is that of its own columns.

    Args:
        logits: [N, V/tp] float of any width, finite; rank i of tp holds columns i·V/tp onwards. Not modified.
        hidden: [N, h] the reference's final hidden states, the same on every rank.
        weight: [V/tp, h] of the reference's output layer, the rank's columns; of the dtype of `hidden`.
        group: the tensor-parallel group; None: the vocabulary is not split.
        vocab_size: size of the real vocabulary; columns from there on are padding and count as impossible.
        temperature: divisor of both logits, as in sampling.
        chunk: rows worked off at a time; bounds the memory to four copies of [chunk, V/tp] in float32.

    Returns:
        [N] float32 in nats; not negative but for rounding.

    Raises:
        ValueError: temperature or chunk not positive, or shapes that do not fit.
    """
    check_logits(logits, group, vocab_size, temperature, chunk)
    if hidden.shape != (len(logits), weight.shape[1]) or len(weight) != logits.shape[1]:
        shapes = ", ".join(f"{tuple(tensor.shape)}" for tensor in (logits, hidden, weight))
        raise ValueError(f"logits, hidden, weight are {shapes}: must be [N, V/tp], [N, h], [V/tp, h]")
    kl: Tensor = _VocabParallelKL.apply(logits, hidden, weight, group, vocab_size, temperature, chunk)
    return kl


class _VocabParallelKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        hidden: Tensor,
        weight: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        rows, columns = logits.shape
        real = real_columns(columns, group, vocab_size)
        # z, y: scaled logits of policy and reference. Both are treated alike, step by step: where they are equal, all
        # that is computed from them is, bit for bit. First by the largest of this rank's own columns, as those of y
        # do not last until ranks have agreed on a common one
        largest = logits.new_full((2, rows), torch.finfo(torch.float32).min, dtype=torch.float32)
        sums = logits.new_zeros((3, rows), dtype=torch.float32)  # Σ e^z, Σ e^y, Σ e^z (z − y)
        for part in row_chunks(rows, chunk) if real else ():
            z = scaled_copy(logits[part, :real], temperature)
            y = _reference(hidden, weight, part, real, temperature)
            for which, x in enumerate((z, y)):
                largest[which, part] = x.amax(dim=1)
                x.sub_(largest[which, part, None])
                sums[which, part] = x.exp().sum(dim=1)
            sums[2, part] = torch.sub(z, y, out=y).mul_(z.exp_()).sum(dim=1)
        whole = largest.clone()
        all_reduce(whole, dist.ReduceOp.MAX, group)
        shift = largest - whole
        sums[2] += sums[0] * (shift[0] - shift[1])
        sums *= shift[[0, 1, 0]].exp()
        all_reduce(sums, dist.ReduceOp.SUM, group)

        log_sums = sums[:2].log()
        kl = sums[2] / sums[0] + (log_sums[1] - log_sums[0])
        ctx.save_for_backward(logits, hidden, weight, whole + log_sums, kl)
        ctx.real, ctx.temperature, ctx.chunk = real, temperature, chunk
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        logits, hidden, weight, log_normalisers, kl = ctx.saved_tensors
        real, temperature = ctx.real, ctx.temperature
        grad_logits = torch.empty_like(logits)
        grad_logits[:, real:] = 0
        for part in row_chunks(len(logits), ctx.chunk) if real else ():
            log_p = scaled_copy(logits[part, :real], temperature).sub_(log_normalisers[0, part, None])
            log_q = _reference(hidden, weight, part, real, temperature).sub_(log_normalisers[1, part, None])
            difference = torch.sub(log_p, log_q, out=log_q)
            grad_z = difference.sub_(kl[part, None]).mul_(log_p.exp_()).mul_(grad_kl[part, None])
            grad_logits[part, :real] = grad_z.div_(temperature)
        return grad_logits, None, None, None, None, None, None


def _reference(hidden: Tensor, weight: Tensor, part: slice, real: int, temperature: float) -> Tensor:
    """Scaled logits of the reference, [rows of the part, real] float32, in memory of their own."""
    # the product includes the padding as the output layer's does, so that equal models have equal bits
    return scaled_copy((hidden[part] @ weight.t())[:, :real], temperature)
