"""Truncated importance weights and the policy loss they weigh, against NumPy, with the gradient."""

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.importance import truncated_weights, weight_metrics
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.metrics.names import METRICS
from mindspeed_rl.types import Denominators


def columns(seed: int) -> dict[str, np.ndarray]:
    """Log-probs of 200 tokens under the policy now, before the update, and when they were sampled."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.5, 200)
    return {
        "now": old + rng.normal(0, 0.3, 200),
        "old": old,
        "rollout": old + rng.normal(0, 0.8, 200),
        "advantages": rng.normal(size=200),
        "mask": (rng.random(200) < 0.8) * 1.0,
        "stale": rng.random(200) < 0.5,
    }


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0, 1e9])
@pytest.mark.parametrize("which", ["all", "stale"])
def test_weights_are_truncated_ratios(threshold: float, which: str) -> None:
    c = columns(0)
    stale = torch.tensor(c["stale"]) if which == "stale" else None
    weights = truncated_weights(torch.tensor(c["old"]), torch.tensor(c["rollout"]), threshold, stale)
    expected = np.minimum(np.exp(c["old"] - c["rollout"]), threshold)
    if which == "stale":
        expected = np.where(c["stale"], expected, 1.0)
    np.testing.assert_allclose(weights, expected, rtol=1e-14)


def test_weights_stay_finite_and_are_constants() -> None:
    old = torch.tensor([0.0, -500.0, 500.0], requires_grad=True)
    weights = truncated_weights(old, torch.zeros(3), threshold=2.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([1.0, float(np.exp(-20.0)), 2.0]))


def test_weighted_loss_and_its_gradient() -> None:
    c = columns(1)
    now = torch.tensor(c["now"], requires_grad=True)
    tensors = {name: torch.tensor(values) for name, values in c.items()}
    importance = truncated_weights(tensors["old"], tensors["rollout"], 2.0, tensors["stale"])
    loss, metrics = PolicyObjective(RLConfig(clip_ratio=0.2))(
        log_probs=now,
        entropy=None,
        old_log_probs=tensors["old"],
        ref_log_probs=tensors["rollout"],
        advantages=tensors["advantages"],
        mask=tensors["mask"],
        response_lengths=torch.tensor([150, 50]),
        denominators=Denominators(c["mask"].sum(), 2.0),
        kl_coef=0.1,
        importance=importance,
    )
    loss.backward()

    w = np.where(c["stale"], np.minimum(np.exp(c["old"] - c["rollout"]), 2.0), 1.0)
    r, a = np.exp(c["now"] - c["old"]), c["advantages"]
    d = c["now"] - c["rollout"]
    share = c["mask"] / c["mask"].sum()
    pg = w * np.maximum(-a * r, -a * np.clip(r, 0.8, 1.2))
    kl = np.exp(-d) + d - 1  # not weighted
    clipped = np.where(a > 0, r > 1.2, r < 0.8)
    gradient = w * np.where(clipped, 0, -a * r) + 0.1 * (1 - np.exp(-d))
    assert loss.item() == pytest.approx((share * (pg + 0.1 * kl)).sum(), rel=1e-6)
    np.testing.assert_allclose(now.grad, share * gradient, rtol=1e-6, atol=1e-12)
    assert metrics["actor/pg_loss"].result == pytest.approx((share * pg).sum(), rel=1e-6)


def test_weights_of_one_change_nothing_and_junk_at_masked_tokens_neither() -> None:
    c = {name: torch.tensor(values) for name, values in columns(2).items()}
    results = []
    for importance in (None, torch.ones(200), torch.where(c["mask"] > 0, 1.0, torch.nan)):
        now = c["now"].clone().requires_grad_()
        loss, _ = PolicyObjective(RLConfig())(
            now, None, c["old"], None, c["advantages"], c["mask"], torch.tensor([200]), Denominators(160, 1), 0.0,
            importance,
        )  # fmt: skip
        loss.backward()
        results.append((loss.item(), now.grad))
    for loss, gradient in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(gradient, results[0][1])


def test_metrics_of_weights() -> None:
    weights, mask = torch.tensor([2.0, 1.0, 0.5, torch.nan]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    metrics = weight_metrics(weights, 2.0, mask)
    assert metrics.finalize() == pytest.approx({"rollout/is_weight": 3.5 / 3, "rollout/is_truncated": 1 / 3})
    assert set(metrics) <= set(METRICS)
