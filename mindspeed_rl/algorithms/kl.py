"""KL divergence to the reference policy: estimators per token, and controllers of its coefficient.

Sign: every estimator estimates KL(π ‖ π_ref) ≥ 0 from tokens sampled from π, with ℓ = log π and ℓr = log π_ref of the
sampled token; k1, k2, k3 are named as in http://joschu.net/blog/kl-approx.html. Used as a loss, an estimator's
*gradient* is what counts; it is stated at each. The gradient of the true KL has k2's expectation; with `+` behind its
name an estimator keeps its value and has k2's gradient. The true KL, of whole distributions, is in `full_kl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_rl.algorithms.log_ratio import clamp_log_ratio
from mindspeed_rl.algorithms.registry import Registry
from mindspeed_rl.config.rules_algorithm import MAX_RELATIVE_ERROR
from mindspeed_rl.config.schema import RLConfig

MAX_LOW_VAR_KL = 10.0
STRAIGHT_THROUGH = "+"

KLEstimator = Callable[[Tensor, Tensor], Tensor]
KL_ESTIMATORS: Registry[KLEstimator] = Registry("rl_config.kl_penalty")


@KL_ESTIMATORS.register("kl", "k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """ℓ − ℓr. Unbiased, may be negative. Gradient: ∇ℓ, whose expectation is 0: it measures, but does not pull."""
    return log_probs - ref_log_probs


@KL_ESTIMATORS.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|ℓ − ℓr|. Biased upwards. Gradient: sign(ℓ − ℓr)·∇ℓ."""
    return (log_probs - ref_log_probs).abs()


@KL_ESTIMATORS.register("mse", "k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """½(ℓ − ℓr)². Biased, low variance. Gradient: (ℓ − ℓr)·∇ℓ, in expectation the gradient of the true KL."""
    return 0.5 * (log_probs - ref_log_probs).square()


@KL_ESTIMATORS.register("low_var_kl", "k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """e^d − d − 1 with d = ℓr − ℓ clamped to ±20, the result clamped to ±10. Unbiased, never negative.

    Gradient: (1 − e^d)·∇ℓ, and none where either clamp holds.
    """
    d = clamp_log_ratio(ref_log_probs - log_probs)
    # expm1 keeps the digits that e^d − 1 loses near d = 0, where training starts
    return (torch.expm1(d) - d).clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


def straight_through(estimator: KLEstimator) -> KLEstimator:
    """The estimator's value with the gradient of k2, which is that of the true KL in expectation."""

    def estimate(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        pull = k2(log_probs, ref_log_probs)
        return estimator(log_probs, ref_log_probs).detach() + pull - pull.detach()

    return estimate


for _name in KL_ESTIMATORS.names():
    KL_ESTIMATORS.register(_name + STRAIGHT_THROUGH)(straight_through(KL_ESTIMATORS[_name]))


class KLController(Protocol):
    """Owner of the KL coefficient; its state belongs in the checkpoint."""

    value: float

    def update(self, kl: float, n_sequences: int) -> None:
        """Take note of the mean KL of `n_sequences` sequences."""

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """A coefficient that never changes. A resumed run uses the configured one, not the saved one."""

    def __init__(self, value: float):
        self.value = value

    def update(self, kl: float, n_sequences: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to restore."""


class AdaptiveKLController:
    """Coefficient that steers the KL to a target: value *= 1 + clip(KL/target − 1, ±0.2)·n/horizon.

    Source: arXiv:1909.08593, section 2.2.
    """

    def __init__(self, value: float, target: float, horizon: float):
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, n_sequences: int) -> None:
        """Move the coefficient after `n_sequences` sequences with mean KL per token `kl`.

        Raises:
            ValueError: `kl` is not finite; the coefficient stays as it was.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl = {kl}: the adaptive KL controller needs a finite value")
        error = min(max(kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.value *= 1 + error * n_sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state.get("value", self.value)  # a run with a fixed coefficient has left none


def make_kl_controller(cfg: RLConfig) -> KLController:
    """The controller that `kl_ctrl_type` names."""
    if cfg.kl_ctrl_type == "adaptive":
        return AdaptiveKLController(cfg.init_kl_coef, cfg.kl_target, cfg.kl_horizon)
    return FixedKLController(cfg.init_kl_coef)
