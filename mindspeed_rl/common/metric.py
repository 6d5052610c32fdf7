"""Partial aggregates of metrics that merge exactly over micro-batches, ranks and steps.

Lives below the data plane and the algorithms because all of them report metrics and none may import another.
Holds Python floats only: picklable, no device memory kept alive. Imports without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    Values = float | Sequence[float] | np.ndarray | torch.Tensor

Reduction = Literal["mean", "sum", "max", "min", "std", "exp_mean", "ess"]


@dataclass(frozen=True)
class Metric:
    """A partial aggregate of values x_i with weights w_i; `a + b` is the aggregate of both sets of values.

    `value` holds Σ w·x (for `max` and `min` the extreme x), `weight` Σ w, and `square` Σ w·x² where the
    reduction needs it. A mean is therefore never an average of averages.

    Reductions: mean = Σwx/Σw · sum = Σwx · max · min · std = sqrt(Σwx²/Σw − mean²) (of the population) ·
    exp_mean = exp(Σwx/Σw) · ess = (Σwx)²/(Σw·Σwx²), the effective share of samples of importance weights x.
    """

    value: float
    weight: float
    reduction: Reduction
    unit: str = ""
    square: float = 0.0

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise ValueError(f"reduction = {self.reduction!r}: must be one of {', '.join(get_args(Reduction))}")
        if not self.weight >= 0:
            raise ValueError(f"weight = {self.weight!r}: must be >= 0")

    @classmethod
    def of(cls, values: Values, weights: Values | None, reduction: Reduction, unit: str = "") -> Metric:
        """Aggregate `values` (any shape); entries of weight 0 are left out, whatever they hold (NaN included).

        Args:
            values: a number, sequence, array or tensor.
            weights: of the same shape, or broadcast to it; a 0/1 mask for example. None: 1 each.
            reduction: see the class.
            unit: unit of the values, "" for pure numbers.

        Raises:
            ValueError: a negative weight, shapes that do not broadcast, or an unknown reduction.
        """
        x = _array(values)
        w = np.ones_like(x) if weights is None else np.broadcast_to(_array(weights), x.shape)
        if (w < 0).any():
            raise ValueError(f"weights: the smallest is {w.min()}, must be >= 0")
        x, w = x[w > 0], w[w > 0]
        if reduction in ("max", "min"):
            empty = -math.inf if reduction == "max" else math.inf
            extreme = np.max if reduction == "max" else np.min
            return cls(float(extreme(x)) if x.size else empty, float(w.sum()), reduction, unit)
        square = float((w * x * x).sum()) if reduction in ("std", "ess") else 0.0
        return cls(float((w * x).sum()), float(w.sum()), reduction, unit, square)

    def __add__(self, other: Metric) -> Metric:
        """The aggregate of both sets of values.

        Raises:
            ValueError: the reductions or units differ.
        """
        if (self.reduction, self.unit) != (other.reduction, other.unit):
            raise ValueError(
                f"metrics do not merge: {self.reduction} in {self.unit!r} with {other.reduction} in {other.unit!r}"
            )
        weight = self.weight + other.weight
        if self.reduction in ("max", "min"):
            # np.maximum keeps NaN whichever side it is on; the builtin max would depend on the order
            extreme = np.maximum if self.reduction == "max" else np.minimum
            return Metric(float(extreme(self.value, other.value)), weight, self.reduction, self.unit)
        return Metric(self.value + other.value, weight, self.reduction, self.unit, self.square + other.square)

    @property
    def result(self) -> float | None:
        """The reduced value; None where nothing was counted (a sum of nothing is 0)."""
        if self.reduction == "sum":
            return self.value
        if self.weight == 0:
            return None
        if self.reduction in ("max", "min"):
            return self.value
        mean = self.value / self.weight
        if self.reduction == "exp_mean":
            return float(np.exp(mean))
        if self.reduction == "std":
            return float(np.sqrt(np.maximum(self.square / self.weight - mean**2, 0.0)))
        if self.reduction == "ess":
            return mean**2 * self.weight / self.square if self.square else 0.0
        return mean


class MetricSet(dict[str, Metric]):
    """Metrics by name. Adding to a name that exists merges with it."""

    def add(self, name: str, metric: Metric) -> None:
        """Merge one metric.

        Raises:
            ValueError: the name holds a metric with another reduction or unit.
        """
        try:
            self[name] = self[name] + metric if name in self else metric
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def mean(self, name: str, values: Values, weights: Values | None = None, unit: str = "") -> None:
        """Weighted mean; `weights` may be a mask."""
        self.add(name, Metric.of(values, weights, "mean", unit))

    def sum(self, name: str, values: Values, weights: Values | None = None, unit: str = "") -> None:
        """Weighted sum."""
        self.add(name, Metric.of(values, weights, "sum", unit))

    def max(self, name: str, values: Values, weights: Values | None = None, unit: str = "") -> None:
        """Largest value of weight > 0."""
        self.add(name, Metric.of(values, weights, "max", unit))

    def min(self, name: str, values: Values, weights: Values | None = None, unit: str = "") -> None:
        """Smallest value of weight > 0."""
        self.add(name, Metric.of(values, weights, "min", unit))

    def std(self, name: str, values: Values, weights: Values | None = None, unit: str = "") -> None:
        """Standard deviation of the population."""
        self.add(name, Metric.of(values, weights, "std", unit))

    def exp_mean(self, name: str, values: Values, weights: Values | None = None, unit: str = "") -> None:
        """Exponential of the mean, e.g. a perplexity from negative log-probs."""
        self.add(name, Metric.of(values, weights, "exp_mean", unit))

    def ess(self, name: str, values: Values, weights: Values | None = None, unit: str = "") -> None:
        """Effective share of samples whose importance weights are `values`."""
        self.add(name, Metric.of(values, weights, "ess", unit))

    def merge(self, other: MetricSet) -> MetricSet:
        """Merge `other` into this set, which is returned.

        Raises:
            ValueError: a name occurs in both with different reductions or units.
        """
        for name, metric in other.items():
            self.add(name, metric)
        return self

    def finalize(self) -> dict[str, float]:
        """The reduced values; names for which nothing was counted are left out."""
        return {name: metric.result for name, metric in self.items() if metric.result is not None}


def _array(values: Any) -> np.ndarray:
    """Float64 array of anything number-like; tensors come over from their device in their own precision first."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
