"""The clipped surrogate and the whole objective against NumPy formulas and autograd of the textbook loss."""

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.aggregation import count
from mindspeed_rl.algorithms.losses import clipped_surrogate
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.metrics.names import METRICS
from mindspeed_rl.types import Denominators

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def make_batch(seed, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, 9)
    lengths[:2] = 4, 1
    tokens = int(lengths.sum())
    old = -rng.exponential(1.5, tokens)
    columns = {
        "log_probs": old + rng.normal(0, 0.3, tokens),
        "entropy": rng.exponential(1, tokens),
        "old_log_probs": old,
        "ref_log_probs": old + rng.normal(0, 0.2, tokens),
        "advantages": rng.normal(size=tokens),
        "mask": (rng.random(tokens) < 0.8) * 1.0,
    }
    return {name: torch.tensor(v, dtype=dtype) for name, v in columns.items()}, torch.tensor(lengths)


def sequence_sums(values, lengths):
    ends = np.cumsum(lengths)
    return np.array([values[e - n : e].sum() for n, e in zip(lengths, ends, strict=True)])


@pytest.mark.parametrize("seed", range(5))
def test_surrogate_equals_reference_with_asymmetric_clip(seed):
    rng = np.random.default_rng(seed)
    d, a = rng.normal(0, 0.5, 300), rng.normal(size=300)
    log_ratio = torch.tensor(d, requires_grad=True)
    loss, clipped = clipped_surrogate(log_ratio, torch.tensor(a), 0.2, 0.28)
    loss.sum().backward()
    r = np.exp(d)
    is_clipped = np.where(a > 0, r > 1.28, r < 0.8)
    np.testing.assert_allclose(loss.detach(), np.maximum(-a * r, -a * np.clip(r, 0.8, 1.28)), rtol=1e-12)
    np.testing.assert_array_equal(clipped, is_clipped)
    # d/dd of −A·e^d where not clipped, 0 where clipped
    np.testing.assert_allclose(log_ratio.grad, np.where(is_clipped, 0, -a * r), rtol=1e-12)


def test_surrogate_gradient_at_ratio_one_is_minus_advantage():
    log_ratio = torch.zeros(3, requires_grad=True)
    advantages = torch.tensor([2.0, -1.0, 0.0])
    loss, clipped = clipped_surrogate(log_ratio, advantages, 0.2, 0.2)
    loss.sum().backward()
    assert torch.equal(log_ratio.grad, -advantages)
    assert not clipped.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_surrogate_stays_finite_for_absurd_ratios(advantage):
    log_ratio = torch.tensor([500.0, -500.0], requires_grad=True)
    loss, _ = clipped_surrogate(log_ratio, torch.full((2,), advantage), 0.2, 0.2)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_ratio.grad.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kl_penalty", ["k1", "abs", "k2", "k3"])
def test_objective_equals_textbook_value_and_gradient(mode, kl_penalty):
    cfg = RLConfig(loss_agg_mode=mode, kl_penalty=kl_penalty, entropy_coeff=0.01, clip_ratio=0.15)
    batch, lengths = make_batch(0)
    batch["log_probs"].requires_grad_()
    batch["entropy"].requires_grad_()
    denominators = count(batch["mask"], lengths)
    loss, metrics = PolicyObjective(cfg, horizon=16)(
        **batch, response_lengths=lengths, denominators=denominators, kl_coef=0.05
    )
    loss.backward()

    p, h, o, q, a, m = (column.detach().numpy() for column in batch.values())
    r, n = np.exp(p - o), lengths.numpy()
    pg = np.maximum(-a * r, -a * np.clip(r, 0.85, 1.15))
    d = p - q
    kl = {"k1": d, "abs": abs(d), "k2": d**2 / 2, "k3": np.exp(-d) + d - 1}[kl_penalty]
    pg_gradient = np.where(np.where(a > 0, r > 1.15, r < 0.85), 0, -a * r)
    kl_gradient = {"k1": np.ones_like(d), "abs": np.sign(d), "k2": d, "k3": 1 - np.exp(-d)}[kl_penalty]
    counted = sequence_sums(m, n)
    weight = {
        "token-mean": m / m.sum(),
        "seq-mean-token-sum": m / (counted > 0).sum(),
        "seq-mean-token-mean": m / np.repeat(np.maximum(counted, 1), n) / (counted > 0).sum(),
        "seq-mean-token-sum-norm": m / 16 / (counted > 0).sum(),
    }[mode]
    total = (weight * (pg + 0.05 * kl - 0.01 * h)).sum()
    assert loss.item() == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(
        batch["log_probs"].grad, weight * (pg_gradient + 0.05 * kl_gradient), rtol=1e-6, atol=1e-12
    )
    np.testing.assert_allclose(batch["entropy"].grad, -0.01 * weight, rtol=1e-6)

    values = metrics.finalize()
    clipped = np.where(a > 0, r > 1.15, r < 0.85)
    expected = {
        "actor/loss": total,
        "actor/pg_loss": (weight * pg).sum(),
        "actor/kl": (m * kl).sum() / m.sum(),  # whatever the mode
        "actor/entropy": (weight * h).sum(),
        "actor/pg_clipfrac": (m * clipped).sum() / m.sum(),
        "actor/ppo_kl": (m * (o - p)).sum() / m.sum(),
        "actor/imp_ratio": (m * r).sum() / m.sum(),
    }
    assert values == pytest.approx(expected, rel=1e-5)
    assert set(values) <= set(METRICS)
    assert all(metric.unit == METRICS[name].unit for name, metric in metrics.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches(mode, micro_batch):
    cfg = RLConfig(loss_agg_mode=mode, entropy_coeff=0.01)
    objective = PolicyObjective(cfg, horizon=16)
    batch, lengths = make_batch(1)
    batch["log_probs"].requires_grad_()
    denominators = count(batch["mask"], lengths)
    whole, whole_metrics = objective(**batch, response_lengths=lengths, denominators=denominators, kl_coef=0.1)
    (gradient,) = torch.autograd.grad(whole, batch["log_probs"])

    offsets, total, metrics = [0, *lengths.cumsum(0).tolist()], 0.0, MetricSet()
    for start in range(0, len(lengths), micro_batch):
        stop = min(start + micro_batch, len(lengths))
        part = {name: column[offsets[start] : offsets[stop]] for name, column in batch.items()}
        share, share_metrics = objective(
            **part, response_lengths=lengths[start:stop], denominators=denominators, kl_coef=0.1
        )
        share.backward()
        total += share.item()
        metrics.merge(share_metrics)
    assert total == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(batch["log_probs"].grad, gradient, rtol=1e-6, atol=1e-9)
    assert metrics.finalize() == pytest.approx(whole_metrics.finalize(), rel=1e-6)


def test_first_update_has_no_ratio_whether_or_not_old_log_probs_are_given():
    batch, lengths = make_batch(2, torch.float32)
    batch["log_probs"].requires_grad_()
    arguments = {"response_lengths": lengths, "denominators": count(batch["mask"], lengths), "kl_coef": 0.0}
    results = []
    for old in None, batch["log_probs"].detach().clone():
        loss, metrics = PolicyObjective(RLConfig())(
            **{**batch, "old_log_probs": old, "ref_log_probs": None, "entropy": None}, **arguments
        )
        (gradient,) = torch.autograd.grad(loss, batch["log_probs"])
        assert metrics["actor/ppo_kl"].result == 0.0
        assert metrics["actor/pg_clipfrac"].result == 0.0
        results.append((loss.item(), gradient))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    # then the gradient is the policy gradient
    expected = -batch["advantages"] * batch["mask"] / batch["mask"].sum()
    torch.testing.assert_close(results[0][1], expected)


def test_reference_equal_to_actor_adds_exactly_nothing():
    batch, lengths = make_batch(3, torch.float32)
    batch["ref_log_probs"] = batch["log_probs"].clone()
    _, metrics = PolicyObjective(RLConfig())(
        **batch, response_lengths=lengths, denominators=count(batch["mask"], lengths), kl_coef=1.0
    )
    assert metrics["actor/kl"].result == 0.0


def test_kl_over_the_vocabulary_is_taken_as_it_is():
    batch, lengths = make_batch(3)
    kl = torch.where(batch["mask"] > 0, batch["entropy"], torch.nan).requires_grad_()
    arguments = {**batch, "ref_log_probs": None, "response_lengths": lengths}
    objective, denominators = PolicyObjective(RLConfig(kl_penalty="full")), count(batch["mask"], lengths)
    loss, metrics = objective(**arguments, denominators=denominators, kl_coef=0.3, full_kl=kl)
    loss.backward()
    weight = batch["mask"] / batch["mask"].sum()
    torch.testing.assert_close(kl.grad, 0.3 * weight)
    assert metrics["actor/kl"].result == pytest.approx((weight * batch["entropy"]).sum().item())
    with pytest.raises(ValueError, match=r"kl_coef = 0.3 needs the KL over the vocabulary"):
        objective(**arguments, denominators=denominators, kl_coef=0.3)


def test_masked_tokens_may_hold_anything():
    batch, lengths = make_batch(4)
    arguments = {"response_lengths": lengths, "denominators": count(batch["mask"], lengths), "kl_coef": 0.1}
    objective = PolicyObjective(RLConfig(entropy_coeff=0.1))
    results = []
    for junk in 0.0, torch.nan, torch.inf, -torch.inf:
        columns = {k: v if k == "mask" else v.masked_fill(batch["mask"] == 0, junk) for k, v in batch.items()}
        columns["log_probs"].requires_grad_()
        loss, metrics = objective(**columns, **arguments)
        loss.backward()
        results.append((loss.item(), columns["log_probs"].grad, metrics.finalize()))
    for loss, gradient, values in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(gradient, results[0][1])
        assert values == results[0][2]


def test_rank_without_tokens_contributes_zero_with_a_gradient():
    empty = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0)
    loss, metrics = PolicyObjective(RLConfig())(
        empty, none, none, none, none, none, torch.tensor([0, 0]), Denominators(10, 2), 0.1
    )
    loss.backward()
    assert loss.item() == 0
    assert metrics.finalize() == {}


def test_missing_inputs_name_the_key():
    batch, lengths = make_batch(5)
    arguments = {"response_lengths": lengths, "denominators": count(batch["mask"], lengths)}
    with pytest.raises(ValueError, match=r"rl_config.entropy_coeff = 0.1 needs"):
        PolicyObjective(RLConfig(entropy_coeff=0.1))(**{**batch, "entropy": None}, **arguments, kl_coef=0.0)
    with pytest.raises(ValueError, match=r"kl_coef = 0.2 needs"):
        PolicyObjective(RLConfig())(**{**batch, "ref_log_probs": None}, **arguments, kl_coef=0.2)
    with pytest.raises(ValueError, match=r"rl_config.loss_agg_mode = 'seq-mean-token-sum-norm' needs a horizon"):
        PolicyObjective(RLConfig(loss_agg_mode="seq-mean-token-sum-norm"))
