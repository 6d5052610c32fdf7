"""Metrics merge to exactly what one pass over all values would give."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from mindspeed_rl.common.metric import Metric, MetricSet

REFERENCE = {
    "mean": lambda x, w: (w * x).sum() / w.sum(),
    "sum": lambda x, w: (w * x).sum(),
    "max": lambda x, w: x[w > 0].max(),
    "min": lambda x, w: x[w > 0].min(),
    "std": lambda x, w: math.sqrt((w * (x - (w * x).sum() / w.sum()) ** 2).sum() / w.sum()),
    "exp_mean": lambda x, w: math.exp((w * x).sum() / w.sum()),
    "ess": lambda x, w: (w * x).sum() ** 2 / (w.sum() * (w * x * x).sum()),
}


@pytest.mark.parametrize("reduction", REFERENCE)
@pytest.mark.parametrize("seed", range(5))
def test_any_split_merges_to_the_whole(reduction, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.normal(1, 2, 50), rng.random(50) * (rng.random(50) < 0.7)
    cuts = [0, *sorted(rng.integers(0, 51, 4)), 50]  # unequal parts, some empty
    metrics = MetricSet()
    for start, stop in itertools.pairwise(cuts):
        part = MetricSet()
        getattr(part, reduction)("m", x[start:stop], w[start:stop])
        metrics.merge(part)
    assert metrics.finalize()["m"] == pytest.approx(REFERENCE[reduction](x, w), rel=1e-9)


def test_mean_is_no_average_of_averages():
    metrics = MetricSet()
    metrics.mean("m", [1.0])
    metrics.mean("m", [0.0, 0.0, 0.0])
    assert metrics.finalize() == {"m": 0.25}


def test_accepts_numbers_lists_arrays_and_tensors_of_any_dtype():
    metrics = MetricSet()
    metrics.mean("m", 1.0)
    metrics.mean("m", [2, 3])
    metrics.mean("m", np.float32(4.0))
    metrics.mean("m", torch.tensor([[5.0, 6.0]], dtype=torch.bfloat16, requires_grad=True))
    metrics.mean("m", torch.tensor([True, False]))
    assert metrics.finalize()["m"] == pytest.approx((1 + 2 + 3 + 4 + 5 + 6 + 1 + 0) / 8)
    assert all(type(v) is float for v in (metrics["m"].value, metrics["m"].weight))


def test_weight_zero_hides_whatever_is_there_and_nan_elsewhere_shows():
    metrics = MetricSet()
    for name in REFERENCE:
        getattr(metrics, name)(name, [1.0, math.nan, math.inf], [1, 0, 0])
    assert metrics.finalize() == {**dict.fromkeys(REFERENCE, 1.0), "std": 0.0, "exp_mean": math.e}
    for order in ([math.nan], [1.0]), ([1.0], [math.nan]):
        shown = MetricSet()
        for part in order:
            for name in REFERENCE:
                getattr(shown, name)(name, part)
        assert all(math.isnan(value) for value in shown.finalize().values())


def test_nothing_counted_is_left_out_but_a_sum_is_zero():
    metrics = MetricSet()
    for name in REFERENCE:
        getattr(metrics, name)(name, [], [])
    assert metrics.finalize() == {"sum": 0.0}
    metrics.max("max", [-3.0])
    assert metrics.finalize()["max"] == -3.0


def test_std_of_equal_large_values_is_not_negative_under_the_root():
    assert Metric.of([1e8 + 0.1] * 7, None, "std").result == pytest.approx(0, abs=20)


def test_pickles():
    metrics = MetricSet()
    metrics.mean("m", torch.ones(2), unit="s")
    copy = pickle.loads(pickle.dumps(metrics))
    assert copy == metrics
    assert isinstance(copy, MetricSet)


def test_bad_inputs_name_the_metric():
    metrics = MetricSet()
    metrics.mean("time", 1.0, unit="s")
    with pytest.raises(ValueError, match="time: metrics do not merge: mean in 's' with sum in 's'"):
        metrics.sum("time", 1.0, unit="s")
    with pytest.raises(ValueError, match="mean in 's' with mean in 'ms'"):
        metrics.merge(MetricSet({"time": Metric(1.0, 1.0, "mean", "ms")}))
    with pytest.raises(ValueError, match=r"weights: the smallest is -1.0"):
        metrics.mean("x", [1.0], [-1.0])
    with pytest.raises(ValueError, match="reduction = 'median': must be one of mean, sum"):
        Metric(1.0, 1.0, "median")
    with pytest.raises(ValueError, match="broadcast"):
        metrics.mean("x", [1.0, 2.0, 3.0], [1.0, 2.0])
