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
        of_token = 0.5 * torch.maximum(error, clipped)
        mode = self.cfg.loss_agg_mode
        loss = aggregate(of_token, mask, response_lengths, mode, denominators, self.horizon)
        means = {
            "vf_loss": of_token,
            "vf_clipfrac": (clipped > error).to(error.dtype),
            "values": values,
            "returns": returns,
            "squared_error": error,
        }
        numbers = torch.stack(list(means.values()))[:, counted].detach().cpu()  # one transfer for all of them
        metrics = MetricSet()
        for name, of_counted in zip(means, numbers, strict=True):
            metrics.mean(f"critic/{name}", of_counted)
        metrics.std("critic/returns_std", numbers[list(means).index("returns")])
        return loss, metrics
