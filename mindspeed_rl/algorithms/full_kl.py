"""KL to the reference over the whole vocabulary, through output layers split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_rl.algorithms.log_probs import scaled_copy
from mindspeed_rl.algorithms.vocabulary import Gradients, OutputLayer, wide
from mindspeed_rl.device.kernels import fused


def vocab_parallel_kl(
    hidden: Tensor,
    weight: Tensor,
    reference_hidden: Tensor,
    reference_weight: Tensor,
    layer: OutputLayer,
) -> Tensor:
    """KL(p ‖ q) = Σ_j p_j (log p_j − log q_j) of every row, over the real vocabulary.

    p = softmax(hidden · weightᵀ / temperature) is the policy; q the reference, in the same way, a constant. The
    gradient is exact: ∂KL/∂z_j = p_j (log p_j − log q_j − KL) with z the policy's logits / temperature; nothing of it
    is estimated from the token that was sampled. Of equal models KL and gradient are exactly 0, rounding included.

    Args:
        hidden: [N, h] float of any width, the same on every rank; finite, as are the logits.
        weight: [V/tp, h], of the same dtype; rank i of tp holds rows i·V/tp onwards.
        reference_hidden: [N, h'] of the reference.
        reference_weight: [V/tp, h'] of the reference's output layer.
        layer: how the vocabulary is split, the temperature, and how many rows are worked off at a time: memory is
            taken for both's logits, three times that in float32, and (backward) a gradient like each of the weights.

    Returns:
        [N] float32 in nats, or float64 if `hidden` is; not negative but for rounding.

    Raises:
        ValueError: shapes that do not fit.
    """
    layer.check(hidden, weight)
    layer.check(reference_hidden, reference_weight)
    if len(hidden) != len(reference_hidden) or len(weight) != len(reference_weight):
        rows = f"{len(hidden)} and {len(reference_hidden)} rows, {len(weight)} and {len(reference_weight)} columns"
        raise ValueError(f"policy and reference have {rows}: must be equal")
    kl: Tensor = _VocabParallelKL.apply(hidden, weight, reference_hidden, reference_weight, layer)
    return kl


class _VocabParallelKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        reference_hidden: Tensor,
        reference_weight: Tensor,
        layer: OutputLayer,
    ) -> Tensor:
        rows, dtype = len(hidden), wide(hidden.dtype)
        # first by the largest of this rank's own columns, as a chunk's logits do not last until ranks have agreed
        largest = hidden.new_full((2, rows), torch.finfo(dtype).min, dtype=dtype)
        sums = hidden.new_zeros((3, rows), dtype=dtype)
        for part in layer.parts(rows, weight):
            logits = layer.logits(hidden[part], weight)
            of_reference = layer.logits(reference_hidden[part], reference_weight)
            largest[:, part], sums[:, part] = fused(_sums, logits, of_reference, layer.temperature)
        whole = largest.clone()
        layer.all_reduce(whole, dist.ReduceOp.MAX)
        shift = largest - whole
        sums[2] += sums[0] * (shift[0] - shift[1])
        sums *= shift[[0, 1, 0]].exp()
        layer.all_reduce(sums)

        log_sums = sums[:2].log()
        kl = sums[2] / sums[0] + (log_sums[1] - log_sums[0])
        ctx.save_for_backward(hidden, weight, reference_hidden, reference_weight, whole + log_sums, kl)
        ctx.layer = layer
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, reference_hidden, reference_weight, log_normalisers, kl = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        gradients = Gradients(layer, hidden, weight, ctx.needs_input_grad[1])
        for part in layer.parts(len(hidden), weight):
            logits = layer.logits(hidden[part], weight)
            of_reference = layer.logits(reference_hidden[part], reference_weight)
            of_rows = log_normalisers[0, part], log_normalisers[1, part], kl[part], grad_kl[part]
            gradients.add(part, fused(_gradient, logits, of_reference, *of_rows, layer.temperature))
        return *gradients.whole(), None, None, None


def _sums(logits: Tensor, of_reference: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Largest scaled logits z and y of policy and reference; relative to them Σ e^z, Σ e^y, Σ e^z (z − y).

    Both are treated alike, step by step: where they are equal, all that is computed from them is, bit for bit.
    """
    scaled = [scaled_copy(each, temperature) for each in (logits, of_reference)]
    largest = [each.amax(dim=1) for each in scaled]
    z, y = (each.sub_(most[:, None]) for each, most in zip(scaled, largest, strict=True))
    sums = [each.exp().sum(dim=1) for each in (z, y)]
    sums.append(y.sub_(z).neg_().mul_(z.exp_()).sum(dim=1))
    return torch.stack(largest), torch.stack(sums)


def _gradient(
    logits: Tensor,
    of_reference: Tensor,
    log_normaliser: Tensor,
    log_normaliser_of_reference: Tensor,
    kl: Tensor,
    grad_kl: Tensor,
    temperature: float,
) -> Tensor:
    """Of the policy's logits: ∂KL p (log p − log q − KL) / temperature."""
    log_p = scaled_copy(logits, temperature).sub_(log_normaliser[:, None])
    log_q = scaled_copy(of_reference, temperature).sub_(log_normaliser_of_reference[:, None])
    difference = log_q.sub_(log_p).neg_().sub_(kl[:, None])
    return difference.mul_(log_p.exp_()).mul_((grad_kl / temperature)[:, None]).to(logits.dtype)
