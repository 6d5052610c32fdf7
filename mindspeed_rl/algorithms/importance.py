"""Correction for tokens that another policy sampled than the one being trained."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl.algorithms.log_ratio import clamp_log_ratio
from mindspeed_rl.common.metric import MetricSet


def truncated_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, threshold: float, corrected: Tensor | None = None
) -> Tensor:
    """Truncated importance weights min(e^(ℓo − ℓb), threshold) of tokens, as constants (no gradient).

    With them the mean over tokens that policy b sampled estimates the mean under policy o, with a variance that the
    truncation bounds, at the price of a bias where it acts: Espeholt et al. 2018 (IMPALA, section 4.1, ρ̄); for
    log-probs of another engine, Yao et al. 2025 ("Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training").

    Args:
        old_log_probs: [R] under the policy being trained, before the update, by the training engine.
        rollout_log_probs: [R] under the policy that sampled, by the rollout engine.
        threshold: largest weight, > 0.
        corrected: [R] bool, the tokens to be weighted; others weigh 1. None: all.

    Returns:
        [R], of the dtype of `old_log_probs`.
    """
    weights = clamp_log_ratio((old_log_probs - rollout_log_probs).detach()).exp().clamp(max=threshold)
    return weights if corrected is None else torch.where(corrected, weights, 1.0)


def weight_metrics(weights: Tensor, threshold: float, mask: Tensor) -> MetricSet:
    """Metrics `rollout/is_*` over the counted tokens: mean weight, and share of tokens whose weight was truncated."""
    metrics = MetricSet()
    metrics.mean("rollout/is_weight", weights, mask)
    metrics.mean("rollout/is_truncated", (weights >= threshold).float(), mask)
    return metrics
