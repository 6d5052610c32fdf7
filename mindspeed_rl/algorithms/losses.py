"""Policy losses per token.

Notation: r = exp(ℓ − ℓo) the ratio of a token's probabilities under the policy being trained and the one before the
update, A its advantage, sg(·) a constant of that value, n the counted tokens of a sequence. A user's file adds a loss
by decorating a function `PolicyBatch, RLConfig -> (loss [R], stats)` with `@POLICY_LOSSES.register("name")`
(docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import sum_by_sequence
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
    selected: Tensor | None = None  # [R] bool, tokens chosen by their covariance; None: the loss chooses none

    @property
    def log_ratio(self) -> Tensor:
        """ℓ − ℓo, [R]."""
        return self.log_probs - self.old_log_probs

    def mean_of_sequence(self, values: Tensor) -> Tensor:
        """Mean of `values` [R] over the counted tokens of each token's sequence, [R]; 0 where there are none."""
        total = sum_by_sequence(torch.where(self.mask, values, 0.0), self.response_lengths)
        counted = sum_by_sequence(self.mask.to(values.dtype), self.response_lengths)
        return (total / counted.clamp(min=1)).repeat_interleave(self.response_lengths.to(values.device))


TokenStats = dict[str, Tensor]  # name -> [R] float32, averaged over the counted tokens
PolicyLoss = Callable[[PolicyBatch, RLConfig], tuple[Tensor, TokenStats]]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("rl_config.loss_type")


def clip_bounds(cfg: RLConfig) -> tuple[float, float]:
    """How far the ratio may fall below 1, and rise above it."""
    if cfg.clip_higher_enable:
        assert cfg.clip_ratio_low is not None, "the configuration was checked"
        assert cfg.clip_ratio_high is not None, "the configuration was checked"
        return cfg.clip_ratio_low, cfg.clip_ratio_high
    return cfg.clip_ratio, cfg.clip_ratio


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
    """The clipped surrogate; with `clip_ratio_c`, at most −A·c where A < 0 (dual clip, arXiv:1912.09729, section 4).

    Stats: `pg_clipfrac`, 1 where clipped; `pg_clipfrac_lower`, 1 where the second bound held.
    """
    loss, clipped = clipped_surrogate(batch.log_ratio, batch.advantages, *clip_bounds(cfg))
    stats = {"pg_clipfrac": clipped.float()}
    if cfg.clip_ratio_c is not None:
        most = -batch.advantages * cfg.clip_ratio_c
        bounded = (batch.advantages < 0) & (loss > most)
        loss, stats["pg_clipfrac_lower"] = torch.where(bounded, most, loss), bounded.float()
    return loss, stats


@POLICY_LOSSES.register("gspo")
def gspo(batch: PolicyBatch, cfg: RLConfig) -> tuple[Tensor, TokenStats]:
    """The clipped surrogate of s·exp(ℓ − sg(ℓ)), s = sg(exp(mean of ℓ − ℓo over the sequence)).

    GSPO-token of arXiv:2507.18071, section 4.3; aggregated by `seq-mean-token-mean` it is GSPO, section 4.1.
    Stats: `pg_clipfrac`, 1 where clipped.
    """
    of_sequence = batch.mean_of_sequence(batch.log_ratio.detach())
    log_ratio = batch.log_probs - batch.log_probs.detach() + of_sequence
    loss, clipped = clipped_surrogate(log_ratio, batch.advantages, *clip_bounds(cfg))
    return loss, {"pg_clipfrac": clipped.float()}


@POLICY_LOSSES.register("cispo")
def cispo(batch: PolicyBatch, cfg: RLConfig) -> tuple[Tensor, TokenStats]:
    """−sg(clip(r, 1−low, 1+high))·A·ℓ: no token loses its gradient (CISPO, arXiv:2506.13585, section 3.1).

    Stats: `pg_clipfrac`, 1 where r was clipped.
    """
    low, high = clip_bounds(cfg)
    ratio = clamp_log_ratio(batch.log_ratio.detach()).exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * batch.advantages * batch.log_probs, {"pg_clipfrac": (weight != ratio).float()}


@POLICY_LOSSES.register("sapo")
def sapo(batch: PolicyBatch, cfg: RLConfig) -> tuple[Tensor, TokenStats]:
    """−A·4/τ·σ(τ·(r − 1)), a soft gate instead of a clip (SAPO, arXiv:2511.20347, section 3).

    τ is `sapo_tau_pos` where A > 0, else `sapo_tau_neg`. No stats: nothing is clipped.
    """
    ratio = clamp_log_ratio(batch.log_ratio).exp()
    positive = (batch.advantages > 0).to(ratio.dtype)
    temperature = positive * cfg.sapo_tau_pos + (1 - positive) * cfg.sapo_tau_neg
    return -batch.advantages * 4 / temperature * torch.sigmoid(temperature * (ratio - 1)), {}


@POLICY_LOSSES.register("gmpo")
def gmpo(batch: PolicyBatch, cfg: RLConfig) -> tuple[Tensor, TokenStats]:
    """−A·exp(mean over the sequence of d), the geometric mean of clipped ratios (GMPO, arXiv:2507.20673, section 3).

    d is ℓ − ℓo, but not above `high` where A > 0, and not below −`low` where A < 0: bounds of the logarithm.
    Stats: `pg_clipfrac`, 1 where a token's bound held.
    """
    low, high = clip_bounds(cfg)
    log_ratio = clamp_log_ratio(batch.log_ratio)
    clamped = torch.where(batch.advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    loss = -batch.advantages * batch.mean_of_sequence(clamped).exp()
    return loss, {"pg_clipfrac": (clamped != log_ratio).float()}


@POLICY_LOSSES.register("clip_cov")
def clip_cov(batch: PolicyBatch, cfg: RLConfig) -> tuple[Tensor, TokenStats]:
    """The clipped surrogate without the selected tokens, whose loss is 0 (Clip-Cov, arXiv:2505.22617, section 4.2).

    Stats: `pg_clipfrac`, 1 where clipped; `cov_fraction`, 1 where selected.
    """
    loss, clipped = clipped_surrogate(batch.log_ratio, batch.advantages, *clip_bounds(cfg))
    assert batch.selected is not None, "this loss needs tokens selected by their covariance"
    stats = {"pg_clipfrac": clipped.float(), "cov_fraction": batch.selected.float()}
    return torch.where(batch.selected, 0.0, loss), stats


@POLICY_LOSSES.register("kl_cov")
def kl_cov(batch: PolicyBatch, cfg: RLConfig) -> tuple[Tensor, TokenStats]:
    """−A·r, plus `kl_cov_coef`·|ℓ − ℓo| for the selected tokens (KL-Cov, arXiv:2505.22617, section 4.2).

    Stats: `cov_fraction`, 1 where selected.
    """
    log_ratio = batch.log_ratio
    assert batch.selected is not None, "this loss needs tokens selected by their covariance"
    penalty = torch.where(batch.selected, cfg.kl_cov_coef * log_ratio.abs(), 0.0)
    loss = -batch.advantages * clamp_log_ratio(log_ratio).exp() + penalty
    return loss, {"cov_fraction": batch.selected.float()}
