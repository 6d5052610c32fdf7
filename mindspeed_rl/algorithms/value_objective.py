"""The loss that trains a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import aggregate
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.types import Denominators


class ValueObjective:
    """½ max((V − R)², (V' − R)²) with V' = V within ±`cliprange_value` of its old value, by `loss_agg_mode`.

    The clipped value loss of PPO's published implementation (Engstrom et al. 2020, arXiv:2005.12729, section 3); R
    are the returns.

    Args:
        cfg: the run's `rl_config`.
        horizon: constant length of `seq-mean-token-sum-norm` in tokens; other modes ignore it.
    """

    def __init__(self, cfg: RLConfig, horizon: float | None = None):
        self.cfg, self.horizon = cfg, horizon

    def __call__(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        mask: Tensor,
        response_lengths: Tensor,
        denominators: Denominators,
    ) -> tuple[Tensor, MetricSet]:
        """This micro-batch's share of the global loss, and metrics `critic/*` as means over tokens.

        Args:
            values: [R] float32 with gradient.
            old_values: [R] float32, before the update.
            returns: [R] float32.
            mask: [R] 0/1. Tokens with 0 change nothing, whatever the other columns hold there.
            response_lengths: [B] int64.
            denominators: of the global mini-batch.
        """
        counted, reach = mask > 0, self.cfg.cliprange_value
        values, old, returns = (torch.where(counted, column, 0.0) for column in (values, old_values, returns))
        error = (values - returns).square()
        clipped = (old + (values - old).clamp(-reach, reach) - returns).square()
        loss = aggregate(
            0.5 * torch.maximum(error, clipped),
            mask,
            response_lengths,
            self.cfg.loss_agg_mode,
            denominators,
            self.horizon,
        )
        metrics = MetricSet()
        metrics.mean("critic/vf_loss", 0.5 * torch.maximum(error, clipped), counted)
        metrics.mean("critic/vf_clipfrac", (clipped > error).float(), counted)
        metrics.mean("critic/values", values, counted)
        metrics.mean("critic/returns", returns, counted)
        metrics.std("critic/returns_std", returns, counted)
        metrics.mean("critic/squared_error", error, counted)
        return loss, metrics
