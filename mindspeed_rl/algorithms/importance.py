"""Correction for tokens that another policy, or another engine, sampled than the one being trained."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import sum_by_sequence
from mindspeed_rl.algorithms.log_ratio import clamp_log_ratio
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.schema import RLConfig


def importance_weights(
    cfg: RLConfig,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    response_lengths: Tensor,
    corrected: Tensor | None = None,
) -> tuple[Tensor, MetricSet]:
    """Importance weights of the tokens' losses, as constants (no gradient), and metrics `rollout/is_*` of them.

    From d = ℓo − ℓb, the weight by `rollout_is_level` is

    - `token`: e^d, each token's own (biased, of low variance);
    - `sequence`: e^(sum of d over the sequence), the unbiased one;
    - `geometric`: e^(mean of d over the sequence).

    The exponent is clamped to ±20. By `rollout_is_mode`, weights above `rollout_is_threshold` become that
    (`truncate`: Espeholt et al. 2018, IMPALA, section 4.1, ρ̄), or tokens with a weight outside
    [`rollout_is_threshold_lower`, `rollout_is_threshold`] do not train: weight 0 (`mask`). A sequence with a token
    whose e^d is below `rollout_is_veto_threshold` does not train at all. Denominators stay what they are. With
    `recompute_logprobs: false` the policy ratio is e^d already: weights are 1 where they are not 0.

    Args:
        cfg: settings.
        old_log_probs: [R] under the policy being trained, before the update (`recompute_logprobs: false`: as it is),
            by the training engine.
        rollout_log_probs: [R] under the policy that sampled, by the rollout engine.
        mask: [R] 0/1.
        response_lengths: [B] int64.
        corrected: [R] bool, tokens of another policy: d is 0 at others, which weigh 1, or with their sequence. None:
            all.

    Returns:
        [R], of the dtype of `old_log_probs`; metrics over the counted tokens: mean weight, shares of tokens that were
        truncated or masked, and of sequences under a veto.
    """
    counted = mask > 0
    if corrected is not None:
        counted = counted & corrected
    d = torch.where(counted, (old_log_probs - rollout_log_probs).detach(), 0.0)
    lengths = response_lengths.to(d.device)
    exponent = d
    if cfg.rollout_is_level != "token":
        exponent = sum_by_sequence(d, lengths)
        if cfg.rollout_is_level == "geometric":
            exponent = exponent / sum_by_sequence(counted.to(d.dtype), lengths).clamp(min=1)
        exponent = exponent.repeat_interleave(lengths)
    raw, upper = clamp_log_ratio(exponent).exp(), cfg.rollout_is_threshold
    metrics, mean_mask = MetricSet(), mask > 0
    if cfg.rollout_is_mode == "truncate":
        weights = raw.clamp(max=upper)
        metrics.mean("rollout/is_truncated", (raw >= upper).float(), mean_mask)
    else:
        lower = 1 / upper if cfg.rollout_is_threshold_lower is None else cfg.rollout_is_threshold_lower
        outside = (raw < lower) | (raw > upper)
        weights = torch.where(outside, 0.0, raw if cfg.recompute_logprobs else torch.ones_like(raw))
        metrics.mean("rollout/is_masked", outside.float(), mean_mask)
    if cfg.rollout_is_veto_threshold is not None:
        impossible = (clamp_log_ratio(d).exp() < cfg.rollout_is_veto_threshold).to(d.dtype)
        vetoed = sum_by_sequence(impossible, lengths) > 0
        weights = torch.where(vetoed.repeat_interleave(lengths), 0.0, weights)
        metrics.mean("rollout/is_vetoed", vetoed.float())
    metrics.mean("rollout/is_weight", weights, mean_mask)
    return weights, metrics
