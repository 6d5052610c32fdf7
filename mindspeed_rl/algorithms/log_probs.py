"""Log-probability and entropy from logits whose vocabulary is split over tensor-parallel ranks.

Neither the whole vocabulary nor a float32 copy of all logits ever exists: rows are worked off in chunks, ranks
exchange one maximum and two or three sums a row, and the backward pass computes each chunk's probabilities again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and entropy of every row, with p = softmax(logits / temperature) over the real vocabulary.

    With z = logits / temperature: log p_j = z_j − logsumexp(z), H = logsumexp(z) − Σ p·z. Gradients, exact for both:
    ∂ log p_t / ∂z_j = 1[j = t] − p_j and ∂H / ∂z_j = −p_j·(log p_j + H). The loss is taken to be the same on all
    ranks of `group` (each computes it in full): a rank's gradient is that of its own columns, nothing is added up.

    Args:
        logits: [N, V/tp] float of any width, finite; rank i of tp holds columns i·V/tp onwards. Not modified.
        targets: [N] int64 in [0, vocab_size), the same on every rank.
        group: the tensor-parallel group; None: the vocabulary is not split.
        vocab_size: size of the real vocabulary; columns from there on are padding and count as impossible.
        temperature: divisor of the logits, as in sampling.
        with_entropy: compute the entropy too.
        chunk: rows worked off at a time; bounds the float32 memory to two copies of [chunk, V/tp].

    Returns:
        log_probs [N] float32, and entropy [N] float32 in nats or None.

    Raises:
        ValueError: temperature or chunk not positive, shapes that do not fit, or a target outside the vocabulary
            (checked on the CPU; on accelerators, where the check would stall the queue, such a row gives NaN).
    """
    check_logits(logits, group, vocab_size, temperature, chunk)
    if targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}: must be [N, V/tp] and [N]")
    if (
        targets.device.type == "cpu"
        and len(targets)
        and not 0 <= int(targets.min()) <= int(targets.max()) < vocab_size
    ):
        raise ValueError(f"targets from {int(targets.min())} to {int(targets.max())}: must be in [0, {vocab_size})")
    return _VocabParallelLogProbs.apply(logits, targets, group, vocab_size, temperature, with_entropy, chunk)


def check_logits(
    logits: Tensor, group: dist.ProcessGroup | None, vocab_size: int, temperature: float, chunk: int
) -> None:
    """Raise ValueError, with the value, for what cannot be worked off; arguments as in `vocab_parallel_log_probs`."""
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: must be > 0")
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}: must be >= 1")
    if logits.dim() != 2:
        raise ValueError(f"logits {tuple(logits.shape)}: must be [N, V/tp]")
    ranks = 1 if group is None else dist.get_world_size(group)
    if logits.shape[1] * ranks < vocab_size:
        raise ValueError(
            f"logits have {logits.shape[1]} columns on {ranks} ranks: fewer than vocab_size {vocab_size}"
        )


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        rows, columns = logits.shape
        real = real_columns(columns, group, vocab_size)
        column, is_mine = _own_column(targets, _first_column(columns, group), real)

        # exact in the logits' own precision, and the division by a positive number keeps the order
        largest = logits.new_full((rows,), -torch.inf, dtype=torch.float32)
        if real and rows:
            largest = logits[:, :real].amax(dim=1).float() / temperature
        all_reduce(largest, dist.ReduceOp.MAX, group)

        sums = logits.new_zeros((3 if with_entropy else 2, rows), dtype=torch.float32)
        if real:
            for part in row_chunks(rows, chunk):
                z = scaled_copy(logits[part, :real], temperature).sub_(largest[part, None])
                sums[0, part] = z.gather(1, column[part, None]).squeeze(1) * is_mine[part]
                exp = z.exp()
                sums[1, part] = exp.sum(dim=1)
                if with_entropy:
                    sums[2, part] = exp.mul_(z).sum(dim=1)
        all_reduce(sums, dist.ReduceOp.SUM, group)

        log_sum = sums[1].log()
        log_probs = sums[0] - log_sum
        log_probs.masked_fill_((targets < 0) | (targets >= vocab_size), torch.nan)
        entropy = log_sum - sums[2] / sums[1] if with_entropy else None
        ctx.save_for_backward(logits, column, is_mine, largest + log_sum, entropy)
        ctx.real, ctx.temperature, ctx.chunk = real, temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, column, is_mine, log_normaliser, entropy = ctx.saved_tensors
        real, temperature = ctx.real, ctx.temperature
        grad_logits = torch.empty_like(logits)
        grad_logits[:, real:] = 0
        for part in row_chunks(len(logits), ctx.chunk) if real else ():
            log_p = scaled_copy(logits[part, :real], temperature).sub_(log_normaliser[part, None])
            p = log_p.exp()
            if grad_entropy is None:
                grad_z = log_p.zero_()  # in place: chunk·V/tp is the size that matters here
            else:
                grad_z = log_p.add_(entropy[part, None]).mul_(p).mul_(-grad_entropy[part, None])
            if grad_log_probs is not None:
                upstream = grad_log_probs[part, None]
                grad_z.addcmul_(p, upstream, value=-1)
                grad_z.scatter_add_(1, column[part, None], upstream * is_mine[part, None])
            grad_logits[part, :real] = grad_z.div_(temperature)
        return grad_logits, None, None, None, None, None, None


def _first_column(columns: int, group: dist.ProcessGroup | None) -> int:
    """Index in the whole vocabulary."""
    return 0 if group is None else dist.get_rank(group) * columns


def real_columns(columns: int, group: dist.ProcessGroup | None, vocab_size: int) -> int:
    """How many of this rank's columns are not padding: its first ones."""
    return min(max(vocab_size - _first_column(columns, group), 0), columns)


def _own_column(targets: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank (0 where another rank holds it), and float 1 where this rank holds it."""
    local = targets - first
    is_mine = (local >= 0) & (local < real)
    return torch.where(is_mine, local, 0), is_mine.float()


def scaled_copy(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32, in memory of its own that the caller may overwrite."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def row_chunks(rows: int, chunk: int) -> list[slice]:
    """All rows, at most `chunk` at a time."""
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """In place, over the ranks of `group` if there is one."""
    if group is not None:
        dist.all_reduce(values, operation, group=group)
