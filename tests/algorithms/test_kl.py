"""KL estimators, their gradients, and the controllers."""

import math

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    make_kl_controller,
)
from mindspeed_rl.config.algorithm import KL_PENALTIES
from mindspeed_rl.config.schema import RLConfig

# name -> value and derivative by ℓ, in float64 from ℓ and ℓr, away from the clamps
TEXTBOOK = {
    "k1": (lambda p, r: p - r, lambda p, r: np.ones_like(p)),
    "kl": (lambda p, r: p - r, lambda p, r: np.ones_like(p)),
    "abs": (lambda p, r: np.abs(p - r), lambda p, r: np.sign(p - r)),
    "k2": (lambda p, r: (p - r) ** 2 / 2, lambda p, r: p - r),
    "mse": (lambda p, r: (p - r) ** 2 / 2, lambda p, r: p - r),
    "k3": (lambda p, r: np.exp(r - p) - (r - p) - 1, lambda p, r: 1 - np.exp(r - p)),
    "low_var_kl": (lambda p, r: np.exp(r - p) - (r - p) - 1, lambda p, r: 1 - np.exp(r - p)),
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_value_and_gradient(name):
    rng = np.random.default_rng(0)
    p = -rng.exponential(2, 500).astype(np.float32)
    r = (p + rng.normal(0, 0.5, 500)).astype(np.float32)
    log_probs = torch.tensor(p, requires_grad=True)
    result = KL_ESTIMATORS[name](log_probs, torch.tensor(r))
    result.sum().backward()
    value, derivative = TEXTBOOK[name]
    p, r = p.astype(np.float64), r.astype(np.float64)
    np.testing.assert_allclose(result.detach().numpy(), value(p, r), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_probs.grad.numpy(), derivative(p, r), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TEXTBOOK)
def test_straight_through_has_the_value_and_the_gradient_of_k2(name):
    rng = np.random.default_rng(1)
    p = torch.tensor(-rng.exponential(2, 200), requires_grad=True)
    r = p.detach() + torch.tensor(rng.normal(0, 0.5, 200))
    result = KL_ESTIMATORS[f"{name}+"](p, r)
    result.sum().backward()
    np.testing.assert_allclose(result.detach(), KL_ESTIMATORS[name](p.detach(), r), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(p.grad, p.detach() - r)


def test_every_configurable_name_is_tested_and_registered():
    assert set(KL_PENALTIES) == set(TEXTBOOK)
    assert {*KL_PENALTIES, *(f"{name}+" for name in KL_PENALTIES)} == set(KL_ESTIMATORS.names())


@pytest.mark.parametrize("name", TEXTBOOK)
def test_zero_exactly_where_policies_agree(name):
    x = torch.tensor([-0.1, -3.0, -20.0])
    assert torch.equal(KL_ESTIMATORS[name](x, x.clone()), torch.zeros(3))
    assert torch.equal(KL_ESTIMATORS[f"{name}+"](x, x.clone()), torch.zeros(3))


def test_low_var_kl_clamps_value_and_gradient():
    log_probs = torch.tensor([-200.0, -5.0, 0.0], requires_grad=True)
    result = KL_ESTIMATORS["k3"](log_probs, torch.tensor([0.0, 0.0, -200.0]))
    result.sum().backward()
    # d = 200 -> e^20 -> 10; d = 5 -> e^5 - 6 > 10; d = -200 -> -20: e^-20 + 20 - 1 -> 10
    assert result.tolist() == [10.0, 10.0, 10.0]
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]


def test_low_var_kl_is_never_negative_near_zero():
    d = torch.logspace(-9, -1, 200)
    for sign in (1, -1):
        value = KL_ESTIMATORS["k3"](torch.zeros(200), sign * d)
        assert (value >= 0).all()
        # relative to d²/2 the error stays small where e^d − d − 1 in float32 would have no digit right
        exact = np.expm1(sign * d.double().numpy()) - sign * d.double().numpy()
        np.testing.assert_allclose(value[d > 1e-2].numpy(), exact[d.numpy() > 1e-2], rtol=1e-4)


def test_k1_and_k3_estimate_the_true_kl():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 8, generator=generator, dtype=torch.float64).log_softmax(-1)
    samples = torch.multinomial(p.exp(), 400_000, replacement=True, generator=generator)
    truth = (p.exp() * (p - q)).sum().item()
    for name in ("k1", "k3"):
        assert KL_ESTIMATORS[name](p[samples], q[samples]).mean().item() == pytest.approx(truth, rel=0.02)


def test_fixed_controller():
    controller = make_kl_controller(RLConfig(init_kl_coef=0.05))
    assert isinstance(controller, FixedKLController)
    controller.update(100.0, 1000)
    assert controller.value == 0.05
    controller.load_state_dict(FixedKLController(0.9).state_dict())
    assert controller.value == 0.05


@pytest.mark.parametrize(
    ("kl", "error"), [(0.1, 0.0), (0.11, 0.1), (0.095, -0.05), (5.0, 0.2), (0.0, -0.2), (-3.0, -0.2)]
)
def test_adaptive_controller_formula(kl, error):
    controller = AdaptiveKLController(0.5, target=0.1, horizon=1000)
    controller.update(kl, n_sequences=64)
    assert controller.value == pytest.approx(0.5 * (1 + error * 64 / 1000), rel=1e-12)


def test_adaptive_controller_state_and_bad_value():
    cfg = RLConfig(kl_ctrl_type="adaptive", init_kl_coef=0.1, kl_target=0.2, kl_horizon=100)
    controller = make_kl_controller(cfg)
    controller.update(1.0, 10)
    resumed = make_kl_controller(cfg)
    resumed.load_state_dict(controller.state_dict())
    for kl in (0.3, 0.01):
        controller.update(kl, 7)
        resumed.update(kl, 7)
    assert resumed.value == controller.value != 0.1
    with pytest.raises(ValueError, match="kl = nan"):
        controller.update(math.nan, 10)
    anew = make_kl_controller(cfg)
    anew.load_state_dict(make_kl_controller(RLConfig(init_kl_coef=0.7)).state_dict())
    assert anew.value == 0.1  # a run with a fixed coefficient leaves none
    assert resumed.value == controller.value
