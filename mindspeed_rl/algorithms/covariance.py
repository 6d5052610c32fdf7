"""Which tokens Clip-Cov and KL-Cov treat apart (Cui et al. 2025, arXiv:2505.22617, section 4.2).

The covariance of a token is (ℓ − mean of ℓ)·(A − mean of A), the means over the counted tokens of the global
mini-batch: tokens with the largest ones drive the entropy down. ℓ is taken under the policy before the update, so
that the choice is made once for a mini-batch and does not depend on how it is split up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl.config.schema import RLConfig


@dataclass(frozen=True)
class Collectives:
    """Over the ranks that share a mini-batch: sums of numbers, and tensors of equal shape from all of them."""

    sum: Callable[[Sequence[float]], list[float]]
    gather: Callable[[Tensor], Tensor]  # [n] float32 -> [ranks, n]


def token_noise(seed: int, iteration: int, row: int, length: int) -> Tensor:
    """Uniform numbers of a response's tokens, [length] float32, the same wherever it is trained on."""
    return torch.from_numpy(np.random.default_rng((seed, iteration, row)).random(length, np.float32))


def select_tokens(
    cfg: RLConfig, log_probs: Tensor, advantages: Tensor, mask: Tensor, noise: Tensor, collectives: Collectives
) -> Tensor:
    """Tokens to be treated apart, of those of this rank: [R] bool.

    KL-Cov takes the share `kl_cov_ratio` with the largest covariances, Clip-Cov so many (`clip_cov_ratio`) at random
    of those whose covariance is between `clip_cov_lb` and `clip_cov_ub`; both at least one where there is one.

    Args:
        cfg: settings.
        log_probs: [R] under the policy before the update.
        advantages: [R].
        mask: [R] 0/1.
        noise: [R] float32, uniform in [0, 1), of its own for every token: the order of Clip-Cov's random choice.
        collectives: over the ranks that share the mini-batch.
    """
    counted = mask > 0
    log_probs, advantages = log_probs.double(), advantages.double()
    sums = [float(counted.sum()), float(log_probs[counted].sum()), float(advantages[counted].sum())]
    tokens, *totals = collectives.sum(sums)
    if not tokens:
        return torch.zeros_like(counted)
    covariance = (log_probs - totals[0] / tokens) * (advantages - totals[1] / tokens)
    if cfg.loss_type == "kl_cov":
        order, ratio = covariance, cfg.kl_cov_ratio
    else:
        within = (covariance >= cfg.clip_cov_lb) & (covariance <= cfg.clip_cov_ub)
        counted, order, ratio = counted & within, noise, cfg.clip_cov_ratio
    order = torch.where(counted, order, -torch.inf).float()  # as ranks exchange it
    number = max(1, int(ratio * tokens))
    mine = torch.full((number,), -torch.inf)
    found = order.topk(min(number, len(order))).values
    mine[: len(found)] = found
    threshold = collectives.gather(mine).flatten().topk(number).values[-1]
    return counted & (order >= threshold)
