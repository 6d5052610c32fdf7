"""Policy losses per token.

To add one, decorate a function `PolicyBatch, RLConfig -> (loss [R], stats)` with `@POLICY_LOSSES.register("name")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl.algorithms.log_ratio import clamp_log_ratio
from mindspeed_rl.algorithms.registry import Registry
from mindspeed_rl.config.schema import RLConfig


@dataclass(frozen=True)
class PolicyBatch:
    """What a policy loss may read. Values at tokens with mask 0 are 0 in every column."""

    log_probs: Tensor  # [R] float32, under the policy being trained; carries the gradient
    old_log_probs: Tensor  # [R] float32, under the policy before the update
    advantages: Tensor  # [R] float32
    mask: Tensor  # [R] bool
    response_lengths: Tensor  # [B] int64


TokenStats = dict[str, Tensor]  # name -> [R] float32, averaged over the counted tokens
PolicyLoss = Callable[[PolicyBatch, RLConfig], tuple[Tensor, TokenStats]]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """max(−A·r, −A·clip(r, 1−clip_low, 1+clip_high)) with r = exp(log_ratio) (PPO, arXiv:1707.06347).

    The logarithm of r is clamped to ±20: beyond it neither value nor gradient change.

    Args:
        log_ratio: [R], ℓ − ℓo.
        advantages: [R].
        clip_low: largest relative decrease of the probability that is still rewarded.
        clip_high: largest relative increase that is still rewarded.

    Returns:
        loss [R], and [R] bool: where clipping took the gradient away.
    """
    ratio = clamp_log_ratio(log_ratio).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


@POLICY_LOSSES.register("ppo")
def ppo(batch: PolicyBatch, cfg: RLConfig) -> tuple[Tensor, TokenStats]:
    """Clipped surrogate with `clip_ratio` on both sides.

    Stats: `pg_clipfrac`, 1 where clipped; `ppo_kl`, ℓo − ℓ, an estimate of KL(old ‖ current) that may be negative.
    """
    log_ratio = batch.log_probs - batch.old_log_probs
    loss, clipped = clipped_surrogate(log_ratio, batch.advantages, cfg.clip_ratio, cfg.clip_ratio)
    return loss, {"pg_clipfrac": clipped.float(), "ppo_kl": -log_ratio.detach()}
