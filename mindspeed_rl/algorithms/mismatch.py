"""How far the training engine's log-probs of generated tokens are from the rollout engine's."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl.algorithms.log_ratio import clamp_log_ratio
from mindspeed_rl.common.metric import MetricSet

WEIGHT_BOUNDS = (0.5, 2.0)


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> MetricSet:
    """Metrics `rollout/*` over the counted tokens, from d = ℓo − ℓb and the importance weight w = e^d (d within ±20).

    - `logprob_diff_mean`, `logprob_diff_max`: of |d|, in nats;
    - `k3`: mean of w − d − 1, an estimate of KL(rollout ‖ training);
    - `ppl_ratio`: perplexity under training / under rollout = exp(mean of −d); 1 when they agree;
    - `ess`: (Σw)²/(n·Σw²), the share of tokens that the weighted sample is worth; 1 when they agree;
    - `weight_out_fraction`: share of tokens with w outside [0.5, 2];
    - `weight_mean`, `weight_std`, `weight_max`, `weight_min`: of w;
    - `chi2`: mean of w² − 1, an estimate of χ²(training ‖ rollout).

    Args:
        old_log_probs: [R] float32, under the training engine before the update.
        rollout_log_probs: [R] float32, as reported when the tokens were sampled.
        mask: [R] 0/1.
    """
    counted = (mask > 0).cpu()
    # one transfer each; all that follows is small and wants float64
    old, rollout = old_log_probs.detach().cpu().double(), rollout_log_probs.detach().cpu().double()
    d = (old - rollout)[counted]
    exponent = clamp_log_ratio(d)
    weight = exponent.exp()
    low, high = WEIGHT_BOUNDS
    metrics = MetricSet()
    metrics.mean("rollout/logprob_diff_mean", d.abs(), unit="nat")
    metrics.max("rollout/logprob_diff_max", d.abs(), unit="nat")
    metrics.mean("rollout/k3", torch.expm1(exponent) - exponent, unit="nat")
    metrics.exp_mean("rollout/ppl_ratio", -d)
    metrics.ess("rollout/ess", weight)
    metrics.mean("rollout/weight_out_fraction", ((weight < low) | (weight > high)).float())
    for name in ("mean", "std", "max", "min"):
        getattr(metrics, name)(f"rollout/weight_{name}", weight)
    metrics.mean("rollout/chi2", weight**2 - 1)
    return metrics
