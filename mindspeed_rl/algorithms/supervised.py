"""Losses of stages that learn from given responses: supervised fine-tuning (SFT) and direct preferences (DPO).

An objective says what a *row* of the data set is (a response, or a chosen and a rejected one), what the global
mini-batch's denominators are, and the loss of a micro-batch. Sums are divided by those denominators, so that the
gradient does not depend on micro-batches or layout.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import logsigmoid

from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.schema import Config
from mindspeed_rl.config.supervised import RESPONSES, DPOConfig
from mindspeed_rl.types import Denominators, RolloutBatch

LOSS_MASK, REFERENCE = "loss_mask", "reference_log_probs"  # columns of a batch


class SupervisedObjective(Protocol):
    """What is learned from rows of `responses` sequences each, which follow each other in a batch."""

    responses: int
    uses_reference: bool  # the column `reference_log_probs`

    def denominators(self, batch: RolloutBatch) -> Denominators:
        """This batch's part of those of the global mini-batch."""

    def __call__(
        self, batch: RolloutBatch, log_probs: torch.Tensor, denominators: Denominators
    ) -> tuple[torch.Tensor, MetricSet]:
        """Loss (a scalar: the batch's part of the mini-batch's) and metrics.

        Args:
            batch: whole rows, with the column `loss_mask`.
            log_probs: [R] float32, of its response tokens.
            denominators: of the global mini-batch.
        """


def make_objective(config: Config) -> SupervisedObjective:
    """That of `stage`."""
    return DPO(config.dpo_config) if config.actor.stage == "dpo" else SFT()


class SFT:
    """Mean negative log-prob of the tokens to be learned: -Σ m ℓ / Σ m over the mini-batch."""

    responses = RESPONSES["sft"]
    uses_reference = False

    def denominators(self, batch: RolloutBatch) -> Denominators:
        return Denominators(_tokens(batch), len(batch))

    def __call__(
        self, batch: RolloutBatch, log_probs: torch.Tensor, denominators: Denominators
    ) -> tuple[torch.Tensor, MetricSet]:
        mask = torch.cat(batch.columns[LOSS_MASK]).to(log_probs.device)
        metrics = MetricSet()
        metrics.mean("sft/loss", -log_probs.detach(), mask, unit="nat")
        metrics.exp_mean("sft/perplexity", -log_probs.detach(), mask)
        metrics.sum("sft/tokens", mask, unit="tokens")
        return -(log_probs * mask).sum() / denominators.tokens, metrics


class DPO:
    """Direct preference optimisation: rows are a chosen and a rejected response to one prompt.

    With h = Σ m (ℓ - ℓr) of the chosen response minus that of the rejected one, the loss of a pair is

    - sigmoid: -(1 - s) log σ(β h) - s log σ(-β h) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7; with label
      smoothing s: Mitchell 2023, "A note on DPO with noisy preferences", eq. 3);
    - ipo: (h - 1 / (2 β))² (Azar et al. 2023, arXiv:2310.12036, eq. 17);
    - hinge: max(0, 1 - β h) (Zhao et al. 2023, arXiv:2305.10425, eq. 10, with the reference's log-probs).

    The mean over pairs, plus `sft_coef` times the SFT loss of the chosen responses.
    """

    responses = RESPONSES["dpo"]
    uses_reference = True

    def __init__(self, cfg: DPOConfig):
        self.cfg = cfg

    def denominators(self, batch: RolloutBatch) -> Denominators:
        chosen = batch.select(range(0, len(batch), 2))
        return Denominators(_tokens(chosen), len(chosen))

    def __call__(
        self, batch: RolloutBatch, log_probs: torch.Tensor, denominators: Denominators
    ) -> tuple[torch.Tensor, MetricSet]:
        device, lengths = log_probs.device, batch.response_lengths.tolist()
        mask, reference = (torch.cat(batch.columns[name]).to(device) for name in (LOSS_MASK, REFERENCE))
        ratios = _sums((log_probs - reference) * mask, lengths).view(-1, 2)
        rewards = self.cfg.beta * ratios.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        losses = self._losses(ratios[:, 0] - ratios[:, 1])
        loss = losses.sum() / denominators.sequences
        counts = (_sums(mask, lengths).view(-1, 2)[:, 0] > 0).float()  # rows that only fill up do not
        metrics = MetricSet()
        metrics.mean("dpo/loss", losses.detach(), counts)
        metrics.mean("dpo/rewards/chosen", rewards[:, 0], counts)
        metrics.mean("dpo/rewards/rejected", rewards[:, 1], counts)
        metrics.mean("dpo/margin", margins, counts)
        metrics.mean("dpo/accuracy", (margins > 0).float(), counts)
        chosen_mask = mask * torch.cat([torch.full((n,), 1.0 - i % 2) for i, n in enumerate(lengths)]).to(device)
        metrics.mean("dpo/chosen_nll", -log_probs.detach(), chosen_mask, unit="nat")
        if self.cfg.sft_coef:
            loss = loss - self.cfg.sft_coef * (log_probs * chosen_mask).sum() / denominators.tokens
        return loss, metrics

    def _losses(self, h: torch.Tensor) -> torch.Tensor:
        """[pairs] of h [pairs]."""
        beta, smoothing = self.cfg.beta, self.cfg.label_smoothing
        if self.cfg.loss_type == "ipo":
            return (h - 1 / (2 * beta)) ** 2
        if self.cfg.loss_type == "hinge":
            return torch.relu(1 - beta * h)
        return -(1 - smoothing) * logsigmoid(beta * h) - smoothing * logsigmoid(-beta * h)


def _tokens(batch: RolloutBatch) -> float:
    return float(sum(float(mask.sum()) for mask in batch.columns[LOSS_MASK]))


def _sums(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[B] sums of values [R] over each response."""
    return torch.stack([part.sum() for part in values.split(lengths)])
