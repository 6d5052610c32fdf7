"""Importance weights of every level and mode and the policy loss they weigh, against NumPy, with the gradient."""

import math

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.importance import importance_weights
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.metrics.names import METRICS
from mindspeed_rl.types import Denominators

LENGTHS = [60, 0, 1, 99, 40]


def columns(seed: int, spread: float = 0.8) -> dict[str, np.ndarray]:
    """Log-probs of 200 tokens under the policy now, before the update, and when they were sampled."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.5, 200)
    return {
        "now": old + rng.normal(0, 0.3, 200),
        "old": old,
        "rollout": old + rng.normal(0, spread, 200),
        "advantages": rng.normal(size=200),
        "mask": (rng.random(200) < 0.8) * 1.0,
        "stale": rng.random(200) < 0.5,
    }


def expected_weights(cfg: RLConfig, c: dict[str, np.ndarray], corrected: np.ndarray) -> tuple[np.ndarray, float]:
    """Sequence by sequence; and the share of sequences under a veto."""
    found, vetoes, start = [], 0, 0
    for length in LENGTHS:
        part = slice(start, start + length)
        start += length
        counts = (c["mask"][part] > 0) & corrected[part]
        d = np.where(counts, c["old"][part] - c["rollout"][part], 0.0)
        if cfg.rollout_is_level == "token":
            raw = np.exp(d)
        elif cfg.rollout_is_level == "sequence":
            raw = np.full(length, math.exp(min(max(d.sum(), -20), 20)))
        else:
            raw = np.full(length, math.exp(d.sum() / max(counts.sum(), 1)))
        if cfg.rollout_is_mode == "truncate":
            weights = np.minimum(raw, cfg.rollout_is_threshold)
        else:
            lower = cfg.rollout_is_threshold_lower
            lower = 1 / cfg.rollout_is_threshold if lower is None else lower
            kept = raw if cfg.recompute_logprobs else 1.0
            weights = np.where((raw >= lower) & (raw <= cfg.rollout_is_threshold), kept, 0.0)
        if cfg.rollout_is_veto_threshold and (np.exp(d) < cfg.rollout_is_veto_threshold).any():
            weights, vetoes = np.zeros(length), vetoes + 1
        found.append(weights)
    return np.concatenate(found), vetoes / len(LENGTHS)


@pytest.mark.parametrize("which", ["all", "stale"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rollout_is_threshold": 1e9},
        {"rollout_is_mode": "mask"},
        {"rollout_is_mode": "mask", "recompute_logprobs": False},
        {"rollout_is_mode": "mask", "rollout_is_threshold": 4.0, "rollout_is_threshold_lower": 0.0},
        {"rollout_is_veto_threshold": 0.3},
    ],
)
def test_weights_equal_the_formula(level: str, settings: dict, which: str) -> None:
    c, cfg = columns(0), RLConfig(rollout_is_level=level, **settings)
    t = {name: torch.tensor(values) for name, values in c.items()}
    stale = t["stale"] if which == "stale" else None
    weights, metrics = importance_weights(cfg, t["old"], t["rollout"], t["mask"], torch.tensor(LENGTHS), stale)
    expected, vetoes = expected_weights(cfg, c, c["stale"] if which == "stale" else np.full(200, True))
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    assert set(metrics) <= set(METRICS)
    values = metrics.finalize()
    counted = c["mask"] > 0
    assert values["rollout/is_weight"] == pytest.approx(expected[counted].mean())
    if "rollout_is_veto_threshold" in settings:
        assert 0 < vetoes < 1
        assert values["rollout/is_vetoed"] == pytest.approx(vetoes)
    elif cfg.rollout_is_mode == "mask":
        assert values["rollout/is_masked"] == pytest.approx((expected[counted] == 0).mean())
    else:
        assert values["rollout/is_truncated"] == pytest.approx((expected[counted] >= cfg.rollout_is_threshold).mean())


def test_equal_policies_weigh_one_exactly() -> None:
    old = torch.tensor(columns(0)["old"])
    for level in ("token", "sequence", "geometric"):
        cfg = RLConfig(rollout_is_level=level, rollout_is_mode="mask", rollout_is_veto_threshold=0.999)
        weights, _ = importance_weights(cfg, old, old, torch.ones(200), torch.tensor(LENGTHS))
        assert torch.equal(weights, torch.ones(200, dtype=torch.float64))


def test_weights_stay_finite_and_are_constants() -> None:
    old = torch.tensor([0.0, -500.0, 500.0], requires_grad=True)
    weights, _ = importance_weights(RLConfig(), old, torch.zeros(3), torch.ones(3), torch.tensor([3]))
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([1.0, float(np.exp(-20.0)), 2.0]))


def test_weighted_loss_and_its_gradient() -> None:
    c = columns(1)
    now = torch.tensor(c["now"], requires_grad=True)
    t, lengths = {name: torch.tensor(values) for name, values in c.items()}, torch.tensor(LENGTHS)
    importance, _ = importance_weights(RLConfig(), t["old"], t["rollout"], t["mask"], lengths, t["stale"])
    loss, metrics = PolicyObjective(RLConfig(clip_ratio=0.2))(
        log_probs=now,
        entropy=None,
        old_log_probs=t["old"],
        ref_log_probs=t["rollout"],
        advantages=t["advantages"],
        mask=t["mask"],
        response_lengths=lengths,
        denominators=Denominators(c["mask"].sum(), 4.0),
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


def test_junk_log_probs_at_masked_tokens_weigh_nothing() -> None:
    old, mask = torch.zeros(4), torch.tensor([1.0, 0.0, 1.0, 0.0])
    for level in ("token", "sequence", "geometric"):
        cfg = RLConfig(rollout_is_level=level, rollout_is_veto_threshold=0.5)
        rollout = torch.where(mask > 0, 0.0, torch.nan)
        weights, metrics = importance_weights(cfg, old, rollout, mask, torch.tensor([2, 2]))
        assert weights.tolist() == [1.0, 1.0, 1.0, 1.0]
        assert metrics["rollout/is_vetoed"].result == 0.0
