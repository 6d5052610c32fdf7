"""Advantage estimators: from one reward a sequence to one advantage a response token.

To add one, decorate a function `AdvantageInputs, RLConfig -> [R]` with `@ADVANTAGES.register("name")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl.algorithms.registry import Registry
from mindspeed_rl.config.schema import RLConfig

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may read. Per-sequence statistics are float64, so that they are exact for float32 rewards."""

    rewards: Tensor  # [B] float64 on the CPU; 0 where the sample failed
    valid: Tensor  # [B] bool; False where the sample failed
    groups: Tensor  # [B] int64, 0 <= group < number of groups
    mask: Tensor  # [R] 0/1
    response_lengths: Tensor  # [B] int64 on the CPU

    @property
    def num_groups(self) -> int:
        return int(self.groups.max()) + 1 if len(self.groups) else 0

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [B] over the valid samples of each group -> [number of groups]."""
        zeros = torch.zeros(self.num_groups, dtype=values.dtype)
        return zeros.index_add(0, self.groups, torch.where(self.valid, values, 0.0))

    def spread(self, values: Tensor) -> Tensor:
        """Give every counted token its sequence's value: [B] -> [R] float32 on the mask's device."""
        tokens = values.float().repeat_interleave(self.response_lengths)
        return tokens.to(self.mask.device) * (self.mask > 0)


Estimator = Callable[[AdvantageInputs, RLConfig], Tensor]
ADVANTAGES: Registry[Estimator] = Registry("rl_config.adv_estimator")


def compute_advantages(
    name: str, rewards: Tensor, groups: Tensor, mask: Tensor, response_lengths: Tensor, cfg: RLConfig
) -> Tensor:
    """Advantage of every response token.

    A NaN reward marks a sample whose scoring failed: its group's statistics leave it out and its own advantage is 0.
    The caller masks such a sample, so that it does not count in the loss's denominator either.

    Args:
        name: a name in `ADVANTAGES`.
        rewards: [B] float, one a sequence; NaN: failed.
        groups: [B] int64, index of the prompt a sequence answers; any integers, in any order.
        mask: [R] float or bool, 0 where a token does not count.
        response_lengths: [B] int64, tokens of each response; may be 0.
        cfg: settings of the estimators.

    Returns:
        [R] float32 without gradient, 0 where the mask is 0.

    Raises:
        ValueError: an unknown name, sizes that do not fit each other, or an infinite reward.
    """
    estimator = ADVANTAGES[name]
    if not len(rewards) == len(groups) == len(response_lengths):
        sizes = f"{len(rewards)}, {len(groups)}, {len(response_lengths)}"
        raise ValueError(f"rewards, groups, response_lengths have {sizes} entries: must be equal")
    if int(response_lengths.sum()) != len(mask):
        raise ValueError(f"response_lengths sum to {int(response_lengths.sum())}, but mask has {len(mask)} tokens")
    rewards = rewards.detach().cpu().double()
    if rewards.isinf().any():
        raise ValueError(
            f"rewards[{int(rewards.isinf().nonzero()[0])}] is infinite: must be finite, or NaN if failed"
        )
    valid = ~rewards.isnan()
    _, dense_groups = groups.cpu().unique(return_inverse=True)
    inputs = AdvantageInputs(rewards.nan_to_num(0.0), valid, dense_groups, mask, response_lengths.cpu())
    return estimator(inputs, cfg)


@ADVANTAGES.register("group_norm", "grpo")
def group_norm(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """A = (R − μ_g) / (σ_g + 1e-6) with unbiased σ_g; a group of one: A = R (GRPO, arXiv:2402.03300).

    Deviations are taken from the group's smallest reward first, so that equal rewards give exactly 0.
    """
    rewards, groups = inputs.rewards, inputs.groups
    count = inputs.group_sum(torch.ones_like(rewards))
    smallest = torch.full((inputs.num_groups,), torch.inf, dtype=rewards.dtype)
    smallest = smallest.scatter_reduce(0, groups, torch.where(inputs.valid, rewards, torch.inf), "amin")
    shifted = torch.where(inputs.valid, rewards - smallest[groups], 0.0)
    centred = shifted - (inputs.group_sum(shifted) / count.clamp(min=1))[groups]
    std = (inputs.group_sum(centred**2) / (count - 1).clamp(min=1)).sqrt()
    advantages = torch.where(count[groups] == 1, rewards, centred / (std[groups] + STD_EPSILON))
    return inputs.spread(torch.where(inputs.valid, advantages, 0.0))
