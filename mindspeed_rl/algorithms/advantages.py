"""Advantage estimators: from one reward a sequence to one advantage a response token.

Notation: R the reward of a sequence, μ and σ mean and unbiased standard deviation over its group, n the group's size,
all over the samples that were scored. A user's file adds an estimator by decorating a function
`AdvantageInputs, RLConfig -> [R]` with `@ADVANTAGES.register("name")` (docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mindspeed_rl.algorithms.registry import Registry
from mindspeed_rl.config.schema import RLConfig

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may read; float64, so that statistics are exact for float32 rewards."""

    rewards: Tensor  # [B] float64 on the CPU, penalties of tokens included; 0 where the sample failed
    valid: Tensor  # [B] bool; False where the sample, or its greedy response, failed
    groups: Tensor  # [B] int64, 0 <= group < number of groups
    mask: Tensor  # [R] 0/1
    response_lengths: Tensor  # [B] int64 on the CPU
    token_rewards: Tensor  # [R] float64 on the CPU: penalties, and the rest of a reward at its last counted token
    values: Tensor | None = None  # [R] float64 on the CPU, of a critic: what was expected before each token
    baselines: Tensor | None = None  # [B] float64 on the CPU, of greedy responses; 0 where the sample failed

    @property
    def num_groups(self) -> int:
        return int(self.groups.max()) + 1 if len(self.groups) else 0

    @property
    def group_sizes(self) -> Tensor:
        """Scored samples of the group of each sequence -> [B] float64."""
        return self.group_sum(torch.ones_like(self.rewards))[self.groups]

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [B] over the valid samples of each group -> [number of groups]."""
        zeros = torch.zeros(self.num_groups, dtype=values.dtype)
        return zeros.index_add(0, self.groups, torch.where(self.valid, values, 0.0))

    def group_min(self, values: Tensor) -> Tensor:
        """Smallest of `values` [B] over the valid samples of the group of each sequence -> [B]; ∞ without any."""
        smallest = torch.full((self.num_groups,), torch.inf, dtype=values.dtype)
        found = torch.where(self.valid, values, torch.inf)
        return smallest.scatter_reduce(0, self.groups, found, "amin")[self.groups]

    def shifted(self) -> Tensor:
        """R less the smallest of the group, [B]: of equal rewards, 0 and not what rounding leaves."""
        return torch.where(self.valid, self.rewards - self.group_min(self.rewards), 0.0)

    def centred(self) -> Tensor:
        """R − μ, [B]: exactly 0 for equal rewards."""
        shifted = self.shifted()
        mean = self.group_sum(shifted)[self.groups] / self.group_sizes.clamp(min=1)
        return torch.where(self.valid, shifted - mean, 0.0)

    def group_std(self) -> Tensor:
        """σ of the group of each sequence, [B]; 0 for a group of one."""
        squares = self.group_sum(self.centred() ** 2)[self.groups]
        return (squares / (self.group_sizes - 1).clamp(min=1)).sqrt()

    def spread(self, values: Tensor) -> Tensor:
        """Give every counted token its sequence's value: [B] -> [R] float32 on the mask's device."""
        return self.counted(values.repeat_interleave(self.response_lengths))

    def counted(self, tokens: Tensor) -> Tensor:
        """[R] with 0 where the mask is 0, float32 on the mask's device."""
        return tokens.float().to(self.mask.device) * (self.mask > 0)

    def whitened(self, tokens: Tensor) -> Tensor:
        """[R] float64 less its mean over the counted tokens, over their deviation: (x − μ) / √(var + 1e-8).

        var is unbiased, and 0 for a single token.
        """
        counted = (self.mask > 0).cpu()
        number = counted.sum()
        centred = tokens - tokens[counted].sum() / number.clamp(min=1)
        variance = (centred[counted] ** 2).sum() / (number - 1).clamp(min=1)
        return centred / (variance + VARIANCE_EPSILON).sqrt()


# With a critic an estimator also says what values should have been, [R] float64: its returns.
Estimate = Tensor | tuple[Tensor, Tensor]
Estimator = Callable[[AdvantageInputs, RLConfig], Estimate]
ADVANTAGES: Registry[Estimator] = Registry("rl_config.adv_estimator")
E = TypeVar("E", bound=Estimator)
_OF_WHOLE_BATCH = "_of_whole_batch"


def of_whole_batch(estimator: E) -> E:
    """Decorator: an estimator whose result depends on all sequences of the iteration, not on a group alone.

    It gets them all at once, so that advantages wait for the last reward.
    """
    setattr(estimator, _OF_WHOLE_BATCH, True)
    return estimator


def needs_whole_batch(name: str) -> bool:
    """True if this estimator must get an iteration's sequences at once."""
    return getattr(ADVANTAGES[name], _OF_WHOLE_BATCH, False)


def compute_advantages(
    name: str,
    rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    response_lengths: Tensor,
    cfg: RLConfig,
    penalties: Tensor | None = None,
    values: Tensor | None = None,
    baselines: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Advantage of every response token, and with a critic its return.

    A NaN reward or baseline marks a sample whose scoring failed: its group's statistics leave it out and its own
    advantage is 0. The caller masks such a sample, so that it does not count in the loss's denominator either.

    Args:
        name: a name in `ADVANTAGES`.
        rewards: [B] float, one a sequence; NaN: failed.
        groups: [B] int64, index of the prompt a sequence answers; any integers, in any order.
        mask: [R] float or bool, 0 where a token does not count.
        response_lengths: [B] int64, tokens of each response; may be 0.
        cfg: settings of the estimators.
        penalties: [R] float, taken off the reward of each token, such as β·KL; None: 0.
        values: [R] float, of the critic; None: there is none.
        baselines: [B] float, reward of a greedy response to the prompt, NaN: failed; None: there are none.

    Returns:
        Advantages and returns, each [R] float32 without gradient, 0 where the mask is 0; no returns without a critic.

    Raises:
        ValueError: an unknown name, sizes that do not fit each other, or an infinite reward or baseline.
    """
    estimator = ADVANTAGES[name]
    if not len(rewards) == len(groups) == len(response_lengths):
        sizes = f"{len(rewards)}, {len(groups)}, {len(response_lengths)}"
        raise ValueError(f"rewards, groups, response_lengths have {sizes} entries: must be equal")
    if int(response_lengths.sum()) != len(mask):
        raise ValueError(f"response_lengths sum to {int(response_lengths.sum())}, but mask has {len(mask)} tokens")
    rewards, valid = _scored("rewards", rewards)
    if baselines is not None:
        if len(baselines) != len(rewards):
            raise ValueError(f"baselines has {len(baselines)} entries, but rewards {len(rewards)}: must be equal")
        baselines, both = _scored("baselines", baselines)
        valid &= both
        baselines = torch.where(valid, baselines, 0.0)
    lengths = response_lengths.cpu()
    tokens = torch.zeros(len(mask), dtype=torch.float64)
    if penalties is not None:
        tokens -= torch.where((mask > 0).cpu(), penalties.detach().cpu().double(), 0.0)
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    of_sequence = torch.zeros_like(rewards).index_add(0, sequences, tokens)
    tokens.index_add_(0, *_last_counted(mask, sequences, rewards))
    _, dense_groups = groups.cpu().unique(return_inverse=True)
    total = torch.where(valid, rewards + of_sequence, 0.0)
    expected = None if values is None else values.detach().cpu().double()
    inputs = AdvantageInputs(total, valid, dense_groups, mask, lengths, tokens, expected, baselines)
    estimate = estimator(inputs, cfg)
    if isinstance(estimate, tuple):
        if values is None:
            raise ValueError(f"rl_config.adv_estimator = {name!r} estimates returns, and there is no critic")
        return estimate[0], inputs.counted(estimate[1])
    return estimate, None


def _scored(name: str, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """[B] float64 on the CPU with 0 for NaN, and [B] bool that is False there."""
    rewards = rewards.detach().cpu().double()
    if rewards.isinf().any():
        raise ValueError(f"{name}[{int(rewards.isinf().nonzero()[0])}] is infinite: must be finite, or NaN if failed")
    return rewards.nan_to_num(0.0), ~rewards.isnan()


def _last_counted(mask: Tensor, sequences: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """The last counted token of each sequence that has one, as indices into R, and the sequence's reward."""
    counted = torch.nonzero((mask > 0).cpu())[:, 0]
    last = torch.full((len(rewards),), -1).scatter_reduce(0, sequences[counted], counted, "amax")
    return last[last >= 0], rewards[last >= 0]


@ADVANTAGES.register("group_norm", "grpo")
def group_norm(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """A = (R − μ) / (σ + 1e-6), and R for a group of one (GRPO, arXiv:2402.03300, section 4.1.2).

    Without `norm_adv_by_std`: A = R − μ (Dr. GRPO, arXiv:2503.20783, section 3.2).
    """
    centred = inputs.centred()
    advantages = centred / (inputs.group_std() + STD_EPSILON) if cfg.norm_adv_by_std else centred
    return inputs.spread(_or_reward_of_one(inputs, advantages))


@ADVANTAGES.register("grpo_passk")
def grpo_passk(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """The best response of a group gets R − (the second best R), over σ + 1e-6 with `norm_adv_by_std`; others get 0.

    The first of several best ones; a group of one: 0 (arXiv:2503.19595, with k = n).
    """
    advantages = torch.zeros_like(inputs.rewards)
    std = inputs.group_std()
    for group in range(inputs.num_groups):
        members = torch.nonzero((inputs.groups == group) & inputs.valid)[:, 0]
        if len(members) > 1:
            order = inputs.rewards[members].sort(descending=True, stable=True).indices
            best, second = members[order[0]], members[order[1]]
            advantages[best] = inputs.rewards[best] - inputs.rewards[second]
    return inputs.spread(advantages / (std + STD_EPSILON) if cfg.norm_adv_by_std else advantages)


@ADVANTAGES.register("rloo")
def rloo(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """A = n/(n−1) · (R − μ), which is R less the mean of the others; R for a group of one (arXiv:2402.14740)."""
    sizes = inputs.group_sizes
    return inputs.spread(_or_reward_of_one(inputs, inputs.centred() * sizes / (sizes - 1).clamp(min=1)))


@ADVANTAGES.register("opo")
def opo(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """A = R − Σ len·R / Σ len over the group, the baseline of least variance (OPO, arXiv:2505.23585, section 3).

    A group of one: R. Lengths are those of the responses; of empty ones alone: R − μ.
    """
    lengths, shifted = inputs.response_lengths.double(), inputs.shifted()
    total = inputs.group_sum(lengths)[inputs.groups]
    baseline = inputs.group_sum(lengths * shifted)[inputs.groups] / total.clamp(min=1)
    advantages = torch.where(total > 0, shifted - baseline, inputs.centred())
    return inputs.spread(_or_reward_of_one(inputs, advantages))


@ADVANTAGES.register("remax")
def remax(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """A = R − R of the greedy response to the same prompt (ReMax, arXiv:2310.10505, algorithm 1).

    Of the KL that is taken off a reward, the baseline has none: it need not depend on what was sampled.
    """
    assert inputs.baselines is not None, "the configuration was checked: rollout generates greedy responses"
    return inputs.spread(inputs.rewards - inputs.baselines)


@ADVANTAGES.register("gpg")
@of_whole_batch
def gpg(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """A = α · (R − μ), α = sequences over those of groups whose rewards differ (GPG, arXiv:2504.02546, section 3.2).

    α makes up for groups that teach nothing. A group of one has no baseline: 0.
    """
    centred = inputs.centred()
    teaching = inputs.group_sum(centred.abs())[inputs.groups] > 0
    alpha = inputs.valid.sum() / (teaching & inputs.valid).sum().clamp(min=1)
    return inputs.spread(alpha * centred)


@ADVANTAGES.register("reinforce_plus_plus")
@of_whole_batch
def reinforce_plus_plus(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """Discounted sum of the rewards from a token on, whitened over the iteration (arXiv:2501.03262, section 3.1)."""
    return inputs.counted(inputs.whitened(_rewards_to_go(inputs, cfg.gamma)))


@ADVANTAGES.register("reinforce_plus_plus_baseline")
@of_whole_batch
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, cfg: RLConfig) -> Tensor:
    """R − μ (R for a group of one) for every token, whitened over the iteration (arXiv:2501.03262, section 3.2)."""
    advantages = _or_reward_of_one(inputs, inputs.centred())
    return inputs.counted(inputs.whitened(advantages.repeat_interleave(inputs.response_lengths)))


@ADVANTAGES.register("gae")
@of_whole_batch
def gae(inputs: AdvantageInputs, cfg: RLConfig) -> tuple[Tensor, Tensor]:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} − V_t, whitened over the iteration (arXiv:1506.02438, eq. 16).

    V is 0 after the end. Tokens that do not count take no time and have no value of their own, as a tool's output:
    the token before them is followed by the one after them. Returns are A + V before whitening.
    """
    assert inputs.values is not None, "the configuration was checked: there is a critic"
    counted = (inputs.mask > 0).cpu()
    # V of the next token that counts, itself included; then of the one after it
    here = backward_scan(torch.where(counted, inputs.values, 0.0), (~counted).double(), inputs.response_lengths)
    after = torch.zeros_like(here)
    last = (inputs.response_lengths.cumsum(0) - 1)[inputs.response_lengths > 0]
    after[:-1] = here[1:]
    after[last] = 0.0
    delta = inputs.token_rewards + torch.where(counted, cfg.gamma * after - inputs.values, 0.0)
    advantages = backward_scan(delta, discounts(inputs, cfg.gamma * cfg.lam), inputs.response_lengths)
    return inputs.counted(inputs.whitened(advantages)), advantages + inputs.values


def _or_reward_of_one(inputs: AdvantageInputs, advantages: Tensor) -> Tensor:
    """R instead, where a sequence is the only one of its group: there is nothing to compare it with."""
    return torch.where(inputs.group_sizes == 1, inputs.rewards, advantages)


def _rewards_to_go(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """Σ_k γ^k r_{t+k} to the end of the response, [R] float64; tokens that do not count take no time."""
    return backward_scan(inputs.token_rewards, discounts(inputs, gamma), inputs.response_lengths)


def discounts(inputs: AdvantageInputs, factor: float) -> Tensor:
    """`factor` where a token counts, else 1: [R] float64 on the CPU."""
    return torch.where((inputs.mask > 0).cpu(), factor, 1.0).double()


def backward_scan(values: Tensor, factors: Tensor, lengths: Tensor) -> Tensor:
    """y_t = values_t + factors_t · y_{t+1} inside each sequence, where y is 0 after its end.

    A step for each position of the longest sequence, whatever their number.

    Args:
        values: [R].
        factors: [R].
        lengths: [B] int64, which add up to R.
    """
    result, starts = torch.zeros_like(values), lengths.cumsum(0) - lengths
    order = lengths.argsort(descending=True)
    starts, lengths = starts[order], lengths[order]
    longer = torch.bincount(lengths, minlength=1).flip(0).cumsum(0).flip(0)  # sequences of at least so many tokens
    following = torch.zeros(len(lengths), dtype=values.dtype)
    for position in range(len(longer) - 2, -1, -1):
        number = int(longer[position + 1])
        here = starts[:number] + position
        following[:number] = values[here] + factors[here] * following[:number]
        result[here] = following[:number]
    return result
