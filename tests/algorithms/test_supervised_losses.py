"""Losses of SFT and DPO worked out by hand."""

import math

import pytest
import torch

from mindspeed_rl.algorithms.supervised import DPO, SFT
from mindspeed_rl.config.supervised import DPOConfig
from mindspeed_rl.types import Denominators, RolloutBatch


def batch(*responses: tuple[list[float], list[float]]) -> RolloutBatch:
    """Of (mask, reference's log-probs) of each response."""
    masks = [torch.tensor(mask) for mask, _ in responses]
    columns = {"loss_mask": masks, "reference_log_probs": [torch.tensor(reference) for _, reference in responses]}
    ids = [torch.zeros(len(mask), dtype=torch.int64) for mask in masks]
    return RolloutBatch([torch.zeros(1, dtype=torch.int64) for _ in ids], ids, columns)


# one pair: h = ((-1 + 2) + (-3 + 2)) - (-2 + 1) = 1; what is masked would change everything
PAIR = batch(([1.0, 1.0, 0.0], [-2.0, -2.0, -9.0]), ([1.0, 0.0], [-1.0, -9.0]))
LOG_PROBS = torch.tensor([-1.0, -3.0, -5.0, -2.0, -7.0], dtype=torch.float64)


def test_sft_is_the_mean_over_tokens_that_are_learned() -> None:
    objective = SFT()
    assert objective.denominators(PAIR) == Denominators(3.0, 2)
    loss, metrics = objective(PAIR, LOG_PROBS, Denominators(6.0, 4.0))  # half of a mini-batch
    assert loss.item() == pytest.approx((1 + 3 + 2) / 6)
    found = metrics.finalize()
    assert found["sft/loss"] == pytest.approx(2.0)
    assert found["sft/perplexity"] == pytest.approx(math.exp(2.0))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("settings", "loss", "slope"),  # of h
    [
        ({}, -math.log(sigmoid(0.5)), -0.5 * sigmoid(-0.5)),
        (
            {"label_smoothing": 0.2},
            -0.8 * math.log(sigmoid(0.5)) - 0.2 * math.log(sigmoid(-0.5)),
            -0.5 * (0.8 * sigmoid(-0.5) - 0.2 * sigmoid(0.5)),
        ),
        ({"loss_type": "ipo"}, (1 - 1.0) ** 2, 0.0),
        ({"loss_type": "ipo", "beta": 0.25}, (1 - 2.0) ** 2, -2.0),
        ({"loss_type": "hinge"}, 0.5, -0.5),
    ],
)
def test_dpo_by_hand(settings: dict[str, object], loss: float, slope: float) -> None:
    objective = DPO(DPOConfig(**{"beta": 0.5, **settings}))
    assert objective.denominators(PAIR) == Denominators(2.0, 1)
    log_probs = LOG_PROBS.clone().requires_grad_()
    value, metrics = objective(PAIR, log_probs, Denominators(2.0, 1.0))
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([slope, slope, 0.0, -slope, 0.0])
    found = metrics.finalize()
    beta = settings.get("beta", 0.5)
    assert found["dpo/rewards/chosen"] == pytest.approx(0.0)
    assert found["dpo/rewards/rejected"] == pytest.approx(-beta)
    assert found["dpo/margin"] == pytest.approx(beta)
    assert found["dpo/accuracy"] == 1.0
    assert found["dpo/chosen_nll"] == pytest.approx(2.0)


def test_the_chosen_response_may_be_learned_as_well() -> None:
    plain, _ = DPO(DPOConfig())(PAIR, LOG_PROBS, Denominators(2.0, 1.0))
    both, _ = DPO(DPOConfig(sft_coef=0.5))(PAIR, LOG_PROBS, Denominators(2.0, 1.0))
    assert (both - plain).item() == pytest.approx(0.5 * (1 + 3) / 2)


def test_pairs_that_only_fill_up_are_in_no_metric() -> None:
    filled = batch(
        ([1.0, 1.0, 0.0], [-2.0, -2.0, -9.0]), ([1.0, 0.0], [-1.0, -9.0]), ([0.0], [-1.0]), ([0.0], [-1.0])
    )
    log_probs = torch.cat((LOG_PROBS, torch.tensor([-3.0, -8.0])))
    _, metrics = DPO(DPOConfig())(filled, log_probs, Denominators(1.0, 1.0))
    _, alone = DPO(DPOConfig())(PAIR, LOG_PROBS, Denominators(1.0, 1.0))
    assert metrics.finalize() == pytest.approx(alone.finalize())
