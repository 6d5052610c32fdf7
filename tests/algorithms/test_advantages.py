"""Advantages against a float64 NumPy reference written out sequence by sequence."""

import math

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.advantages import ADVANTAGES, compute_advantages
from mindspeed_rl.config.schema import RLConfig

CFG = RLConfig()


def reference_group_norm(rewards, groups, lengths, mask):
    """Textbook loops: a mean and an unbiased deviation a group, failed samples left out."""
    per_sequence = np.zeros(len(rewards))
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if math.isnan(reward):
            continue
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if len(members) == 1:
            per_sequence[i] = reward
            continue
        mean = sum(members) / len(members)
        variance = sum((r - mean) ** 2 for r in members) / (len(members) - 1)
        per_sequence[i] = (reward - mean) / (math.sqrt(variance) + 1e-6)
    return np.repeat(per_sequence, lengths) * mask


def run(rewards, groups, lengths, mask=None, name="group_norm"):
    lengths = torch.tensor(lengths, dtype=torch.int64)
    mask = torch.ones(int(lengths.sum())) if mask is None else torch.tensor(mask, dtype=torch.float32)
    rewards = torch.tensor(rewards, dtype=torch.float32)
    return compute_advantages(name, rewards, torch.tensor(groups), mask, lengths, CFG)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["group_norm", "grpo"])
def test_group_norm_equals_reference_on_ragged_batches(seed, name):
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 40))
    groups = rng.integers(0, 9, batch) * 1000 - 3000  # any integers, in any order
    rewards = rng.normal(size=batch).astype(np.float32)
    rewards[rng.random(batch) < 0.15] = np.nan
    lengths = rng.integers(0, 7, batch)
    mask = (rng.random(lengths.sum()) < 0.8).astype(np.float32)
    result = run(rewards.tolist(), groups.tolist(), lengths.tolist(), mask.tolist(), name)
    expected = reference_group_norm(rewards.astype(np.float64).tolist(), groups.tolist(), lengths, mask)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-6, atol=1e-6)


def test_known_values():
    # mean 0.5, unbiased deviation sqrt(1/3)
    result = run([1, 0, 0, 1], [7, 7, 7, 7], [1, 2, 0, 1])
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(result, torch.tensor([a, -a, -a, a]))


@pytest.mark.parametrize("value", [0.1, -0.7, 1 / 3, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(value, size):
    assert torch.equal(run([value] * size, [0] * size, [3] * size), torch.zeros(3 * size))


def test_group_of_one_is_its_reward():
    assert run([0.25, 1.0, 1.0], [0, 1, 1], [2, 1, 1]).tolist() == [0.25, 0.25, 0.0, 0.0]


def test_failed_sample_is_left_out_and_zero():
    with_failure = run([1.0, math.nan, 0.0, 0.5], [0, 0, 0, 0], [1, 2, 1, 1])
    without = run([1.0, 0.0, 0.5], [0, 0, 0], [1, 1, 1])
    assert with_failure.tolist() == [without[0], 0.0, 0.0, without[1], without[2]]
    assert run([math.nan, math.nan], [0, 0], [2, 1]).tolist() == [0.0, 0.0, 0.0]
    # the only sample left is a group of one
    assert run([math.nan, 0.75], [0, 0], [1, 1]).tolist() == [0.0, 0.75]


def test_empty_responses_and_empty_batch():
    # an empty response still counts in its group's statistics
    assert run([1.0, 0.0], [0, 0], [0, 1]).tolist() == pytest.approx([-math.sqrt(0.5)], abs=1e-5)
    assert run([1.0, 0.0], [0, 0], [0, 0]).shape == (0,)
    assert run([], [], []).shape == (0,)


def test_mask_zeroes_tokens():
    assert run([0.5], [0], [3], [1.0, 0.0, 1.0]).tolist() == [0.5, 0.0, 0.5]


def test_bad_inputs_name_the_value():
    with pytest.raises(
        ValueError, match=r"rl_config.adv_estimator = 'group_nrom' is unknown; did you mean 'group_norm'"
    ):
        run([1.0], [0], [1], name="group_nrom")
    with pytest.raises(ValueError, match=r"rewards\[1\] is infinite"):
        run([1.0, math.inf], [0, 0], [1, 1])
    with pytest.raises(ValueError, match="have 2, 1, 1 entries"):
        run([1.0, 2.0], [0], [1])
    with pytest.raises(ValueError, match="sum to 2, but mask has 1"):
        run([1.0], [0], [2], [1.0])
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        ADVANTAGES.register("grpo")(lambda inputs, cfg: inputs.mask)


def test_every_configurable_name_is_registered():
    choices = RLConfig.model_fields["adv_estimator"].annotation.__args__
    assert set(choices) == set(ADVANTAGES.names())
