"""The loss that trains the policy: surrogate, KL to the reference, entropy bonus."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl.algorithms.aggregation import aggregate, count
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl.algorithms.log_ratio import clamp_log_ratio
from mindspeed_rl.algorithms.losses import POLICY_LOSSES, PolicyBatch
from mindspeed_rl.common.metric import Metric, MetricSet
from mindspeed_rl.config.algorithm import FULL_KL
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.types import Denominators

IN_NATS = {"kl", "entropy", "ppo_kl"}


class PolicyObjective:
    """pg_loss + kl_coef·kl − entropy_coeff·entropy, each aggregated by `loss_agg_mode`.

    Args:
        cfg: the run's `rl_config`.
        horizon: constant length of `seq-mean-token-sum-norm` in tokens (the longest response); other modes ignore it.

    Raises:
        ValueError: `loss_agg_mode` needs a horizon and there is none.
    """

    def __init__(self, cfg: RLConfig, horizon: float | None = None):
        if cfg.loss_agg_mode == "seq-mean-token-sum-norm" and not horizon:
            raise ValueError(f"rl_config.loss_agg_mode = {cfg.loss_agg_mode!r} needs a horizon")
        self.cfg, self.horizon = cfg, horizon
        self.policy_loss = POLICY_LOSSES[cfg.loss_type]
        self.estimate_kl = None if cfg.kl_penalty == FULL_KL else KL_ESTIMATORS[cfg.kl_penalty]

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor | None,
        old_log_probs: Tensor | None,
        ref_log_probs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        response_lengths: Tensor,
        denominators: Denominators,
        kl_coef: float,
        importance: Tensor | None = None,
        selected: Tensor | None = None,
        full_kl: Tensor | None = None,
    ) -> tuple[Tensor, MetricSet]:
        """This micro-batch's share of the global loss; the shares of all micro-batches and ranks add up to it.

        Args:
            log_probs: [R] float32 with gradient, under the policy being trained.
            entropy: [R] float32, with gradient if it has a weight; None: no entropy term.
            old_log_probs: [R] float32, before the update; None: equal to `log_probs`, as in the first update.
            ref_log_probs: [R] float32, under the reference; None: no KL term.
            advantages: [R] float32.
            mask: [R] 0/1. Tokens with 0 change nothing, whatever the other columns hold there.
            response_lengths: [B] int64.
            denominators: of the global mini-batch.
            kl_coef: coefficient of the KL term.
            importance: [R] float32, weights of the tokens' policy losses, taken as constants; None: all 1. KL and
                entropy are not weighted: they are properties of the policy being trained at the tokens there are.
            selected: [R] bool, tokens chosen by their covariance, for losses that need them.
            full_kl: [R] float32 with gradient, over the vocabulary; None: no KL term with `kl_penalty: full`.

        Returns:
            Scalar loss, and metrics `actor/*` as means over what the loss is a mean of.

        Raises:
            ValueError: entropy or the reference is missing though its coefficient is not 0.
        """
        cfg, counted = self.cfg, mask > 0
        if entropy is None and cfg.entropy_coeff != 0:
            raise ValueError(f"rl_config.entropy_coeff = {cfg.entropy_coeff} needs the entropy of every token")
        of_reference = full_kl if self.estimate_kl is None else ref_log_probs
        if of_reference is None and kl_coef != 0:
            what = "KL over the vocabulary" if self.estimate_kl is None else "reference's log-probs"
            raise ValueError(f"kl_coef = {kl_coef} needs the {what}")

        def clean(values: Tensor) -> Tensor:
            # selected, not multiplied: 0·NaN would spoil the value, and the gradient of an overflow the weights
            return torch.where(counted, values, 0.0)

        log_probs = clean(log_probs)
        old = log_probs.detach() if old_log_probs is None else clean(old_log_probs)
        chosen = None if selected is None else selected & counted
        batch = PolicyBatch(log_probs, old, clean(advantages), counted, response_lengths, chosen)
        pg_loss, stats = self.policy_loss(batch, cfg)
        log_ratio = batch.log_ratio.detach()
        stats = {**stats, "ppo_kl": -log_ratio, "imp_ratio": clamp_log_ratio(log_ratio).exp()}
        if importance is not None:
            pg_loss = pg_loss * clean(importance.detach())
        loss = self._aggregate(pg_loss, batch, denominators)
        terms = {"pg_loss": loss}
        if of_reference is not None:
            kl = self.estimate_kl(log_probs, clean(of_reference)) if self.estimate_kl else of_reference
            stats["kl"] = clean(kl.detach())  # a mean over tokens in every mode: it has a target that is one
            if kl_coef:  # a weight of 0 must not cost a backward pass
                loss = loss + kl_coef * self._aggregate(kl, batch, denominators)
        if entropy is not None:
            terms["entropy"] = self._aggregate(entropy, batch, denominators)
            if cfg.entropy_coeff:
                loss = loss - cfg.entropy_coeff * terms["entropy"]
        terms["loss"] = loss
        return loss, self._metrics(terms, stats, batch, denominators)

    def _aggregate(self, values: Tensor, batch: PolicyBatch, denominators: Denominators) -> Tensor:
        mode = self.cfg.loss_agg_mode
        return aggregate(values, batch.mask, batch.response_lengths, mode, denominators, self.horizon)

    def _metrics(
        self, terms: dict[str, Tensor], stats: dict[str, Tensor], batch: PolicyBatch, denominators: Denominators
    ) -> MetricSet:
        """Terms of the loss as means over tokens or sequences (by mode), stats as means over tokens."""
        local = count(batch.mask, batch.response_lengths)
        by_token = self.cfg.loss_agg_mode == "token-mean"
        weight, whole = (local.tokens, denominators.tokens) if by_token else (local.sequences, denominators.sequences)
        sums = [value.detach() for value in terms.values()] + [(v * batch.mask).sum() for v in stats.values()]
        numbers = torch.stack(sums).tolist()  # one transfer from the device for all of them
        metrics = MetricSet()
        for name, value in zip(terms, numbers, strict=False):
            metrics.add(f"actor/{name}", Metric(value * whole, weight, "mean", _unit(name)))
        for name, value in zip(stats, numbers[len(terms) :], strict=True):
            metrics.add(f"actor/{name}", Metric(value, local.tokens, "mean", _unit(name)))
        return metrics


def _unit(name: str) -> str:
    return "nat" if name in IN_NATS else ""
