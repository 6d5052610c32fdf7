"""GAE and the value loss against loops in float64, with the gradient."""

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.aggregation import count
from mindspeed_rl.algorithms.value_objective import ValueObjective
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.metrics.names import METRICS

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def reference_gae(rewards, values, mask, lengths, gamma, lam):
    """Of the counted tokens alone, as if the others were not there; what is earned after one is earned by it."""
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    start = 0
    for length in lengths:
        counted = [t for t in range(start, start + length) if mask[t]]
        of_step = [0.0] * len(counted)
        for t in range(start, start + length):
            before = [step for step, at in enumerate(counted) if at <= t]
            if before:
                of_step[before[-1]] += rewards[t]
        following = 0.0
        for step in range(len(counted) - 1, -1, -1):
            t = counted[step]
            next_value = values[counted[step + 1]] if step + 1 < len(counted) else 0.0
            delta = of_step[step] + gamma * next_value - values[t]
            following = delta + gamma * lam * following
            advantages[t], returns[t] = following, following + values[t]
        start += length
    return advantages, returns


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_gae_equals_the_reference(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 8, 12)
    lengths[:2] = 1, 0
    total = int(lengths.sum())
    scores, values = rng.normal(size=12), rng.normal(size=total)
    mask = (rng.random(total) < 0.75).astype(np.float64)
    penalties = rng.normal(0, 0.1, total) * mask
    rewards = -penalties
    ends = np.cumsum(lengths)
    rewards[ends[lengths > 0] - 1] += scores[lengths > 0]
    raw, returns = reference_gae(rewards, values, mask, lengths, gamma, lam)
    counted = mask > 0
    expected = (raw - raw[counted].mean()) / np.sqrt(raw[counted].var(ddof=1) + 1e-8) * mask
    cfg = RLConfig(adv_estimator="gae", gamma=gamma, lam=lam)
    tensors = (torch.tensor(scores), torch.arange(12), torch.tensor(mask), torch.tensor(lengths), cfg)
    found, found_returns = compute_advantages("gae", *tensors, torch.tensor(penalties), torch.tensor(values))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(found_returns, returns * mask, rtol=2e-6, atol=2e-6)


def test_gae_by_hand():
    # values 0.5, 0.25; reward 1 at the end; γ 1, λ 0.5: δ = (0.25 − 0.5, 1 − 0.25), A = (−0.25 + 0.375, 0.75)
    cfg = RLConfig(adv_estimator="gae", lam=0.5)
    lengths, values = torch.tensor([2]), torch.tensor([0.5, 0.25])
    arguments = (torch.tensor([1.0]), torch.tensor([0]), torch.ones(2), lengths, cfg, None, values)
    advantages, returns = compute_advantages("gae", *arguments)
    torch.testing.assert_close(returns, torch.tensor([0.625, 1.0]))
    raw = np.array([0.125, 0.75])
    np.testing.assert_allclose(advantages, (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8), rtol=1e-6)


def columns(seed):
    rng = np.random.default_rng(seed)
    lengths = np.array([5, 0, 1, 7, 3])
    total = int(lengths.sum())
    old = rng.normal(size=total)
    mask = (rng.random(total) < 0.8) * 1.0
    mask[13:] = 0
    return {
        "values": old + rng.normal(0, 0.3, total),
        "old_values": old,
        "returns": old + rng.normal(0, 0.5, total),
        "mask": mask,
    }, lengths


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_value_loss_and_its_gradient_equal_the_formula(seed, mode):
    c, lengths = columns(seed)
    cfg = RLConfig(adv_estimator="gae", cliprange_value=0.2, loss_agg_mode=mode)
    t = {name: torch.tensor(values) for name, values in c.items()}
    t["values"].requires_grad_()
    size = torch.tensor(lengths)
    denominators = count(t["mask"], size)
    loss, metrics = ValueObjective(cfg, horizon=16)(**t, response_lengths=size, denominators=denominators)
    loss.backward()

    v, o, r, m = c.values()
    near = np.clip(v, o - 0.2, o + 0.2)
    is_clipped = (near - r) ** 2 > (v - r) ** 2
    ends = np.cumsum(lengths)
    counted = np.array([m[e - n : e].sum() for n, e in zip(lengths, ends, strict=True)])
    weight = {
        "token-mean": m / m.sum(),
        "seq-mean-token-sum": m / (counted > 0).sum(),
        "seq-mean-token-mean": m / np.repeat(np.maximum(counted, 1), lengths) / (counted > 0).sum(),
        "seq-mean-token-sum-norm": m / 16 / (counted > 0).sum(),
    }[mode]
    value = 0.5 * np.maximum((v - r) ** 2, (near - r) ** 2)
    assert loss.item() == pytest.approx((weight * value).sum(), rel=1e-6)
    gradient = np.where(is_clipped, np.where(near == v, v - r, 0.0), v - r)
    np.testing.assert_allclose(t["values"].grad, weight * gradient, rtol=1e-6, atol=1e-12)
    found = metrics.finalize()
    assert 0 < found["critic/vf_clipfrac"] == pytest.approx(is_clipped[m > 0].mean())
    assert found["critic/vf_loss"] == pytest.approx(value[m > 0].mean())
    assert found["critic/returns_std"] == pytest.approx(r[m > 0].std())
    assert set(metrics) <= set(METRICS)


def test_value_loss_does_not_depend_on_micro_batches_nor_on_masked_values():
    c, lengths = columns(5)
    objective = ValueObjective(RLConfig(adv_estimator="gae"))
    t = {name: torch.tensor(values) for name, values in c.items()}
    denominators = count(t["mask"], torch.tensor(lengths))
    whole, metrics = objective(**t, response_lengths=torch.tensor(lengths), denominators=denominators)
    junk = {name: v if name == "mask" else torch.where(t["mask"] > 0, v, torch.nan) for name, v in t.items()}
    total, merged, start = 0.0, MetricSet(), 0
    for length in lengths:
        part = {name: values[start : start + length] for name, values in junk.items()}
        loss, found = objective(**part, response_lengths=torch.tensor([length]), denominators=denominators)
        total += loss.item()
        merged.merge(found)
        start += length
    assert total == pytest.approx(whole.item(), rel=1e-6)
    assert merged.finalize() == pytest.approx(metrics.finalize(), rel=1e-9)
