"""Every policy loss against NumPy formulas, written out sequence by sequence, with their gradients."""

import math

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.aggregation import count
from mindspeed_rl.algorithms.covariance import Collectives, select_tokens, token_noise
from mindspeed_rl.algorithms.losses import POLICY_LOSSES, PolicyBatch, clipped_surrogate
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.algorithm import LOSS_TYPES
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.metrics.names import METRICS

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOW, HIGH = 0.1, 0.25
HIGHER = {"clip_higher_enable": True, "clip_ratio_low": LOW, "clip_ratio_high": HIGH}


def sequences(seed, spread=0.3):
    """Ragged columns: an empty response, one of a single token, one without a counted token among them."""
    rng = np.random.default_rng(seed)
    lengths = [5, 0, 1, 7, 3, 1, 12]
    total = sum(lengths)
    old = -rng.exponential(1.5, total)
    mask = (rng.random(total) < 0.8) * 1.0
    mask[13:16] = 0  # the fifth response
    mask[5] = 1
    advantages = np.repeat(rng.normal(size=len(lengths)), lengths)
    advantages[6:13] = 0.0
    columns = {"now": old + rng.normal(0, spread, total), "old": old, "advantages": advantages, "mask": mask}
    return columns, lengths, rng


def surrogate(d, a, low, high):
    """Value and derivative by d of max(−A·r, −A·clip(r)), a token."""
    r = math.exp(d)
    clipped = r > 1 + high if a > 0 else r < 1 - low
    value = -a * min(max(r, 1 - low), 1 + high) if clipped and a else -a * r
    return (value, 0.0) if clipped and a else (value, -a * r)


def expected_of_sequence(name, now, old, a, weights, selected, cfg):
    """Token losses [n], and the gradient by `now` of their sum weighted by `weights`; counted tokens only."""
    n, d = len(now), now - old
    values, gradient = np.zeros(n), np.zeros(n)
    if name == "gmpo":
        clamped = np.array([min(x, HIGH) if y > 0 else max(x, -LOW) for x, y in zip(d, a, strict=True)])
        ratio = math.exp(clamped.mean()) if n else 1.0
        return -a * ratio, (weights * -a).sum() * ratio / max(n, 1) * (clamped == d)
    mean = d.mean() if n else 0.0
    for t in range(n):
        if name == "ppo":
            values[t], gradient[t] = surrogate(d[t], a[t], LOW, HIGH)
            if a[t] < 0 and values[t] > -a[t] * cfg.clip_ratio_c:
                values[t], gradient[t] = -a[t] * cfg.clip_ratio_c, 0.0
        elif name == "gspo":
            values[t], gradient[t] = surrogate(mean, a[t], LOW, HIGH)
        elif name == "cispo":
            weight = min(max(math.exp(d[t]), 1 - LOW), 1 + HIGH)
            values[t], gradient[t] = -weight * a[t] * now[t], -weight * a[t]
        elif name == "sapo":
            tau = 1.0 if a[t] > 0 else 1.05
            r = math.exp(d[t])
            gate = 1 / (1 + math.exp(-tau * (r - 1)))
            values[t], gradient[t] = -a[t] * 4 / tau * gate, -a[t] * 4 * gate * (1 - gate) * r
        elif name == "clip_cov":
            values[t], gradient[t] = (0.0, 0.0) if selected[t] else surrogate(d[t], a[t], LOW, HIGH)
        elif name == "kl_cov":
            values[t] = -a[t] * math.exp(d[t]) + selected[t] * 0.7 * abs(d[t])
            gradient[t] = -a[t] * math.exp(d[t]) + selected[t] * 0.7 * np.sign(d[t])
    return values, gradient * weights


def config(name, **further):
    bounds = HIGHER if name not in ("sapo", "kl_cov") else {}
    own = {"ppo": {"clip_ratio_c": 1.3}, "kl_cov": {"kl_cov_coef": 0.7}}.get(name, {})
    return RLConfig(loss_type=name, **bounds, **own, **further)


@pytest.mark.parametrize("name", LOSS_TYPES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_formula(name, seed):
    c, lengths, rng = sequences(seed)
    counted, cfg = c["mask"] > 0, config(name)
    weights, selected = rng.random(len(counted)) * counted, (rng.random(len(counted)) < 0.3) & counted
    now = torch.tensor(c["now"] * counted, requires_grad=True)
    batch = PolicyBatch(
        now,
        torch.tensor(c["old"] * counted),
        torch.tensor(c["advantages"] * counted),
        torch.tensor(counted),
        torch.tensor(lengths),
        torch.tensor(selected),
    )
    loss, _ = POLICY_LOSSES[name](batch, cfg)
    (loss * torch.tensor(weights)).sum().backward()
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        where = np.arange(start, end)[counted[start:end]]
        found = (c["now"][where], c["old"][where], c["advantages"][where], weights[where], selected[where])
        values, gradient = expected_of_sequence(name, *found, cfg)
        np.testing.assert_allclose(loss.detach().numpy()[where], values, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(now.grad.numpy()[where], gradient, rtol=1e-12, atol=1e-14)
    assert not now.grad[~torch.tensor(counted)].any()


def objective(name, mode, columns, lengths, denominators=None):
    mask = torch.tensor(columns["mask"])
    lengths = torch.tensor(lengths)
    now = torch.tensor(columns["now"], requires_grad=True)
    loss, metrics = PolicyObjective(config(name, loss_agg_mode=mode), horizon=16)(
        log_probs=now,
        entropy=None,
        old_log_probs=torch.tensor(columns["old"]),
        ref_log_probs=None,
        advantages=torch.tensor(columns["advantages"]),
        mask=mask,
        response_lengths=lengths,
        denominators=denominators or count(mask, lengths),
        kl_coef=0.0,
        selected=torch.tensor(columns["selected"]),
    )
    loss.backward()
    return loss.item(), now.grad.numpy(), metrics


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_no_loss_depends_on_micro_batches(name, mode):
    c, lengths, rng = sequences(7)
    c["selected"] = rng.random(len(c["mask"])) < 0.3
    whole, gradient, metrics = objective(name, mode, c, lengths)
    denominators = count(torch.tensor(c["mask"]), torch.tensor(lengths))
    ends, total, parts, merged = np.cumsum(lengths), 0.0, [], MetricSet()
    for start, length in zip(ends - lengths, lengths, strict=True):
        part = {key: values[start : start + length] for key, values in c.items()}
        loss, of_part, found = objective(name, mode, part, [length], denominators)
        total += loss
        parts.append(of_part)
        merged.merge(found)
    assert total == pytest.approx(whole, rel=1e-6)
    np.testing.assert_allclose(np.concatenate(parts), gradient, rtol=1e-6, atol=1e-12)
    assert merged.finalize() == pytest.approx(metrics.finalize(), rel=1e-6)
    assert set(metrics) <= set(METRICS)


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_first_update_is_the_policy_gradient(name):
    """At ratio 1 nothing is clipped, and every loss has the gradient −A (kl_cov's penalty has none at 0)."""
    c, lengths, _ = sequences(3, spread=0.0)
    c["selected"] = np.zeros(len(c["mask"]), bool)
    mode = "seq-mean-token-mean"  # gmpo and gspo are of whole sequences
    _, gradient, metrics = objective(name, mode, c, lengths)
    counted = [c["mask"][e - n : e].sum() for n, e in zip(lengths, np.cumsum(lengths), strict=True)]
    weight = c["mask"] / np.repeat(np.maximum(counted, 1), lengths) / sum(n > 0 for n in counted)
    np.testing.assert_allclose(gradient, -c["advantages"] * weight, rtol=1e-6, atol=1e-12)
    values = metrics.finalize()
    assert values["actor/ppo_kl"] == 0.0
    assert values["actor/imp_ratio"] == 1.0
    assert values.get("actor/pg_clipfrac", 0.0) == 0.0


@pytest.mark.parametrize("name", LOSS_TYPES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_losses_stay_finite_for_absurd_ratios(name, advantage):
    now = torch.tensor([-0.1, -500.0], requires_grad=True)
    batch = PolicyBatch(
        now,
        torch.tensor([-500.0, -0.1]),
        torch.full((2,), advantage),
        torch.tensor([True, True]),
        torch.tensor([1, 1]),
        torch.tensor([True, False]),
    )
    loss, _ = POLICY_LOSSES[name](batch, config(name))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert now.grad.isfinite().all()


def test_without_dual_clip_a_loss_has_no_bound():
    d, a = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([-1.0, -1.0, 1.0])
    batch = PolicyBatch(d, torch.zeros(3), a, torch.ones(3, dtype=torch.bool), torch.tensor([3]))
    plain, stats = POLICY_LOSSES["ppo"](batch, RLConfig())
    assert torch.equal(plain, clipped_surrogate(d, a, 0.2, 0.2)[0])
    assert set(stats) == {"pg_clipfrac"}
    bounded, stats = POLICY_LOSSES["ppo"](batch, RLConfig(clip_ratio_c=2.0))
    torch.testing.assert_close(bounded, torch.tensor([2.0, 0.8, -1.2]))
    assert stats["pg_clipfrac_lower"].tolist() == [1.0, 0.0, 0.0]


# ---- selection by covariance


def alone(values):
    return list(values)


ALONE = Collectives(sum=alone, gather=lambda values: values[None])


def selected_by_loops(cfg, log_probs, advantages, mask, noise):
    counted = [i for i, m in enumerate(mask) if m > 0]
    mean_l, mean_a = (sum(x[i] for i in counted) / len(counted) for x in (log_probs, advantages))
    cov = {i: (log_probs[i] - mean_l) * (advantages[i] - mean_a) for i in counted}
    if cfg.loss_type == "kl_cov":
        candidates, order, ratio = counted, cov, cfg.kl_cov_ratio
    else:
        candidates = [i for i in counted if cfg.clip_cov_lb <= cov[i] <= cfg.clip_cov_ub]
        order, ratio = dict(enumerate(noise)), cfg.clip_cov_ratio
    number = max(1, int(ratio * len(counted)))
    return set(sorted(candidates, key=lambda i: -order[i])[:number])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "kl_cov", "kl_cov_ratio": 0.1},
        {"loss_type": "kl_cov"},  # fewer than one token: one
        {"loss_type": "clip_cov", "clip_cov_ratio": 0.05, "clip_cov_lb": 0.2, "clip_cov_ub": 2.0},
        {"loss_type": "clip_cov", "clip_cov_ratio": 0.9, "clip_cov_lb": 1.0},  # more than there are
    ],
)
def test_selection_equals_loops_and_does_not_depend_on_the_ranks(seed, settings):
    rng, cfg = np.random.default_rng(seed), RLConfig(**settings)
    log_probs, advantages = -rng.exponential(1.5, 120), rng.normal(size=120)
    mask = (rng.random(120) < 0.7) * 1.0
    noise = rng.random(120).astype(np.float32)
    tensors = [torch.tensor(x) for x in (log_probs, advantages, mask, noise)]
    chosen = select_tokens(cfg, *tensors, ALONE)
    expected = selected_by_loops(cfg, log_probs, advantages, mask, noise)
    assert set(torch.nonzero(chosen)[:, 0].tolist()) == expected

    # three ranks, the last without a token: what they exchange is collected first, then given to each
    parts = [slice(0, 50), slice(50, 120), slice(120, 120)]
    sums, gathered = [], []
    for part in parts:
        collect = Collectives(lambda v: sums.append(v) or [120.0, 0.0, 0.0], lambda v: v[None])
        select_tokens(cfg, *(t[part] for t in tensors), collect)
    total = [sum(values) for values in zip(*sums, strict=True)]
    for part in parts:
        collect = Collectives(lambda _: total, lambda v: gathered.append(v) or v[None])
        select_tokens(cfg, *(t[part] for t in tensors), collect)
    shared = Collectives(lambda _: total, lambda _: torch.stack(gathered))
    of_ranks = torch.cat([select_tokens(cfg, *(t[part] for t in tensors), shared) for part in parts])
    assert torch.equal(of_ranks, chosen)


def test_nothing_is_selected_where_nothing_counts():
    none = torch.zeros(3)
    assert not select_tokens(RLConfig(loss_type="kl_cov"), none, none, none, none, ALONE).any()


def test_noise_is_of_the_row_alone():
    noise = token_noise(1, 2, 3, 1000)
    assert torch.equal(token_noise(1, 2, 3, 400), noise[:400])
    assert abs(noise.mean() - 0.5) < 0.05
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(token_noise(*other, 1000), noise)


def test_every_configurable_name_is_registered():
    assert set(LOSS_TYPES) == set(POLICY_LOSSES.names())
    with pytest.raises(ValueError, match=r"rl_config.loss_type = 'pppo' is unknown; did you mean 'ppo'"):
        POLICY_LOSSES["pppo"]
