"""Log-probability and entropy from hidden states, through an output layer split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_rl.algorithms.vocabulary import Gradients, OutputLayer, wide
from mindspeed_rl.device.kernels import fused


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    layer: OutputLayer,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and entropy of every row: p = softmax(hidden · weightᵀ / temperature) over the real vocabulary.

    With z = hidden · weightᵀ / temperature: log p_j = z_j − logsumexp(z), H = logsumexp(z) − Σ p·z. Gradients, exact
    for both: ∂ log p_t / ∂z_j = 1[j = t] − p_j and ∂H / ∂z_j = −p_j·(log p_j + H).

    Args:
        hidden: [N, h] float of any width, the same on every rank; finite, as are the logits.
        weight: [V/tp, h], of the same dtype; rank i of tp holds rows i·V/tp onwards.
        targets: [N] int64 in [0, vocab_size), the same on every rank.
        layer: how the vocabulary is split, the temperature, and how many rows are worked off at a time: memory is
            taken for their logits, twice that in float32, and (backward) a gradient like each of the weights.
        with_entropy: compute the entropy too.

    Returns:
        log_probs [N], and entropy [N] in nats or None; float32, or float64 if `hidden` is.

    Raises:
        ValueError: shapes that do not fit, or a target outside the vocabulary (checked on the CPU; on accelerators,
            where the check would stall the queue, such a row gives NaN).
    """
    layer.check(hidden, weight)
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)}: must be [N, h] and [N]")
    if (
        targets.device.type == "cpu"
        and len(targets)
        and not 0 <= (least := int(targets.min())) <= (most := int(targets.max())) < layer.vocab_size
    ):
        raise ValueError(f"targets from {least} to {most}: must be in [0, {layer.vocab_size})")
    return _VocabParallelLogProbs.apply(hidden, weight, targets, layer, with_entropy)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, layer: OutputLayer, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows, dtype = len(hidden), wide(hidden.dtype)
        column, is_mine = layer.own_column(targets, weight)
        # relative to the largest of this rank's own columns, as a chunk's do not last until ranks have agreed on one
        largest = hidden.new_full((rows,), torch.finfo(dtype).min, dtype=dtype)
        sums = hidden.new_zeros((3 if with_entropy else 2, rows), dtype=dtype)  # z of the target, Σ e^z, Σ e^z z
        for part in layer.parts(rows, weight):
            logits = layer.logits(hidden[part], weight)
            largest[part], sums[:, part] = fused(_sums, logits, column[part], layer.temperature, with_entropy)
        whole = largest.clone()
        layer.all_reduce(whole, dist.ReduceOp.MAX)
        shift = largest - whole
        sums[0] = torch.where(is_mine, sums[0] + shift, 0)
        if with_entropy:
            sums[2] += sums[1] * shift
        sums[1:] *= shift.exp()
        layer.all_reduce(sums)

        log_sum = sums[1].log()
        log_probs = sums[0] - log_sum
        log_probs.masked_fill_((targets < 0) | (targets >= layer.vocab_size), torch.nan)
        entropy = log_sum - sums[2] / sums[1] if with_entropy else None
        ctx.save_for_backward(hidden, weight, column, is_mine, whole + log_sum, log_probs, entropy)
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, column, is_mine, log_normaliser, log_probs, entropy = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_probs)
        of_target = -grad_log_probs * log_probs.expm1()
        if grad_entropy is not None:
            of_target -= grad_entropy * log_probs.exp() * (log_probs + entropy)
        gradients = Gradients(layer, hidden, weight, ctx.needs_input_grad[1])
        for part in layer.parts(len(hidden), weight):
            logits = layer.logits(hidden[part], weight)
            upstream = [None if value is None else value[part] for value in (grad_log_probs, grad_entropy, entropy)]
            grad = fused(_gradient, logits, log_normaliser[part], *upstream, layer.temperature)
            # the target's own is computed apart, as almost all of it cancels where the target is likely
            own, own_column = of_target[part, None] / layer.temperature, column[part, None]
            others = grad.gather(1, own_column)
            grad.scatter_(1, own_column, torch.where(is_mine[part, None], own.to(grad.dtype), others))
            gradients.add(part, grad)
        return *gradients.whole(), None, None, None


def _sums(logits: Tensor, column: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Largest scaled logit z of each row, and relative to it: z of the column, Σ e^z, and Σ e^z z if asked for."""
    z = scaled_copy(logits, temperature)
    largest = z.amax(dim=1)
    z.sub_(largest[:, None])
    exp = z.exp()
    found = [z.gather(1, column[:, None])[:, 0], exp.sum(dim=1)]
    if with_entropy:
        found.append(exp.mul_(z).sum(dim=1))
    return largest, torch.stack(found)


def _gradient(
    logits: Tensor,
    log_normaliser: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Of the logits, as if no column were a target's: −p (∂log p + ∂H (log p + H)) / temperature."""
    log_p = scaled_copy(logits, temperature).sub_(log_normaliser[:, None])
    if grad_entropy is None or entropy is None:
        grad = log_p.exp_().mul_((grad_log_probs / -temperature)[:, None])
    else:
        p = log_p.exp()
        grad = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
        grad.mul_(p).div_(-temperature)
    return grad.to(logits.dtype)


def scaled_copy(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, wide, in memory of its own that the caller may overwrite."""
    return logits.to(wide(logits.dtype), copy=True).div_(temperature)
