"""Mismatch metrics against NumPy, and exact merging of the non-linear ones."""

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.mismatch import mismatch_metrics
from mindspeed_rl.metrics.names import METRICS


def make(tokens=200):
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(1, tokens)
    return rollout + rng.normal(0, 0.4, tokens), rollout, (rng.random(tokens) < 0.7) * 1.0


def test_equals_reference():
    old, rollout, mask = make()
    metrics = mismatch_metrics(*map(torch.tensor, (old, rollout, mask)))
    o, b = old[mask > 0], rollout[mask > 0]
    w = np.exp(o - b)
    expected = {
        "rollout/logprob_diff_mean": abs(o - b).mean(),
        "rollout/logprob_diff_max": abs(o - b).max(),
        "rollout/k3": (w - 1 - np.log(w)).mean(),
        "rollout/ppl_ratio": np.exp(-o.mean()) / np.exp(-b.mean()),
        "rollout/ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
        "rollout/weight_out_fraction": ((w < 0.5) | (w > 2)).mean(),
        "rollout/weight_mean": w.mean(),
        "rollout/weight_std": w.std(),
        "rollout/weight_max": w.max(),
        "rollout/weight_min": w.min(),
        "rollout/chi2": (w**2).mean() - 1,
    }
    assert expected["rollout/weight_out_fraction"] > 0
    assert metrics.finalize() == pytest.approx(expected, rel=1e-9)
    assert all((m.reduction, m.unit) == (METRICS[n].reduction, METRICS[n].unit) for n, m in metrics.items())


def test_parts_merge_to_the_whole():
    columns = [torch.tensor(c) for c in make()]
    whole = mismatch_metrics(*columns).finalize()
    merged = mismatch_metrics(*(c[:17] for c in columns))
    for part in (slice(17, 17), slice(17, 120), slice(120, 200)):
        merged.merge(mismatch_metrics(*(c[part] for c in columns)))
    assert merged.finalize() == pytest.approx(whole, rel=1e-12)


def test_agreement_is_exact_and_junk_under_the_mask_is_ignored():
    x = torch.tensor([-1.0, -2.5, torch.nan])
    values = mismatch_metrics(x, x.clone(), torch.tensor([1.0, 1.0, 0.0])).finalize()
    assert values == {
        "rollout/logprob_diff_mean": 0.0,
        "rollout/logprob_diff_max": 0.0,
        "rollout/k3": 0.0,
        "rollout/ppl_ratio": 1.0,
        "rollout/ess": 1.0,
        "rollout/weight_out_fraction": 0.0,
        "rollout/weight_mean": 1.0,
        "rollout/weight_std": 0.0,
        "rollout/weight_max": 1.0,
        "rollout/weight_min": 1.0,
        "rollout/chi2": 0.0,
    }
    assert mismatch_metrics(x, x, torch.zeros(3)).finalize() == {}
