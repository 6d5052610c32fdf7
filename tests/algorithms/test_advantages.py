"""Advantages against a float64 NumPy reference written out sequence by sequence."""

import math

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.advantages import ADVANTAGES, backward_scan, compute_advantages, needs_whole_batch
from mindspeed_rl.config.algorithm import ADV_ESTIMATORS
from mindspeed_rl.config.schema import RLConfig

CFG = RLConfig()
GREEDY = 0.1  # reward of greedy responses, unless told otherwise


def by_group(rewards, groups):
    """Positions of the scored samples of each group."""
    scored = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    return [[i for i in scored if groups[i] == group] for group in sorted(set(groups))]


def whitened(tokens, mask):
    counted = [x for x, m in zip(tokens, mask, strict=True) if m]
    if not counted:
        return np.zeros(len(tokens))
    mean = sum(counted) / len(counted)
    variance = sum((x - mean) ** 2 for x in counted) / max(len(counted) - 1, 1)
    return np.array([(x - mean) / math.sqrt(variance + 1e-8) for x in tokens])


def reference(name, rewards, groups, lengths, mask, cfg, penalties, baselines):
    """Textbook loops, sample by sample; failed ones are left out."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    penalty = [(penalties * mask)[start:end].sum() for start, end in zip(starts, ends, strict=True)]
    totals = [r - p for r, p in zip(rewards, penalty, strict=True)]
    a = np.zeros(len(rewards))
    for members in by_group(rewards, groups):
        scores = [totals[i] for i in members]
        n = len(members)
        mean = sum(scores) / n if n else 0.0
        std = math.sqrt(sum((x - mean) ** 2 for x in scores) / (n - 1)) if n > 1 else 0.0
        scale = 1 / (std + 1e-6) if cfg.norm_adv_by_std else 1.0
        size = sum(lengths[i] for i in members)
        for i in members:
            others = [totals[j] for j in members if j != i]
            if name in ("group_norm", "grpo"):
                a[i] = totals[i] if n == 1 else (totals[i] - mean) * scale
            elif name == "rloo":
                a[i] = totals[i] - (sum(others) / (n - 1) if others else 0.0)
            elif name == "opo":
                weighted = sum(lengths[j] * totals[j] for j in members) / size if size else mean
                a[i] = totals[i] if n == 1 else totals[i] - weighted
            elif name == "remax":
                a[i] = 0.0 if math.isnan(baselines[i]) else totals[i] - baselines[i]
            elif name == "gpg":
                a[i] = totals[i] - mean if any(x != scores[0] for x in scores) else 0.0
            elif name == "reinforce_plus_plus_baseline":
                a[i] = totals[i] if n == 1 else totals[i] - mean
        if name == "grpo_passk" and n > 1:
            best, second, *_ = sorted(members, key=lambda i: -totals[i])
            a[best] = (totals[best] - totals[second]) * scale
    if name == "gpg":
        groups_of = by_group(rewards, groups)
        teaching = sum(len(m) for m in groups_of if any(totals[i] != totals[m[0]] for i in m))
        a *= sum(map(len, groups_of)) / max(teaching, 1)
    tokens = np.repeat(a, lengths)
    if name == "reinforce_plus_plus":
        for reward, start, end in zip(rewards, starts, ends, strict=True):
            later, is_last = 0.0, True
            for t in range(end - 1, start - 1, -1):
                if mask[t]:
                    later = (0.0 if math.isnan(reward) else reward) if is_last else later * cfg.gamma
                    later, is_last = later - penalties[t], False
                tokens[t] = later
    if name.startswith("reinforce"):
        tokens = whitened(tokens, mask)
    return tokens * mask


def run(rewards, groups, lengths, mask=None, name="group_norm", cfg=CFG, penalties=None, baselines=None):
    lengths = torch.tensor(lengths, dtype=torch.int64)
    mask = torch.ones(int(lengths.sum())) if mask is None else torch.tensor(mask, dtype=torch.float32)
    rewards = torch.tensor(rewards, dtype=torch.float32)
    penalties = None if penalties is None else torch.tensor(penalties)
    values = torch.zeros(len(mask)) if name == "gae" else None
    if name == "remax":
        baselines = [GREEDY] * len(rewards) if baselines is None else baselines
        baselines = torch.tensor(baselines, dtype=torch.float32)
    inputs = (name, rewards, torch.tensor(groups), mask, lengths, cfg, penalties, values, baselines)
    return compute_advantages(*inputs)[0]


SETTINGS = [(name, {}) for name in ADV_ESTIMATORS if name != "gae"]  # which test_critic.py is about
SETTINGS += [(name, {"norm_adv_by_std": False}) for name in ("group_norm", "grpo_passk")]
SETTINGS += [("reinforce_plus_plus", {"gamma": 0.9})]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_estimators_equal_the_reference_on_ragged_batches(seed, name, settings):
    rng, cfg = np.random.default_rng(seed), RLConfig(adv_estimator=name, **settings)
    batch = int(rng.integers(1, 40))
    groups = rng.integers(0, 9, batch) * 1000 - 3000  # any integers, in any order
    rewards = rng.integers(0, 3, batch).astype(np.float32) / 2  # equal ones within groups
    rewards[rng.random(batch) < 0.15] = np.nan
    lengths = rng.integers(0, 7, batch)
    mask = (rng.random(lengths.sum()) < 0.8).astype(np.float32)
    mask *= np.repeat(~np.isnan(rewards), lengths)  # as whoever calls does
    penalties = rng.normal(0, 0.1, len(mask)) if seed % 2 else np.zeros(len(mask))
    baselines = None
    if name == "remax":  # of each prompt's greedy response, whose scoring may fail, too
        of_prompt = rng.normal(size=9).astype(np.float32)
        of_prompt[rng.random(9) < 0.15] = np.nan
        baselines = of_prompt[(groups + 3000) // 1000].tolist()
    result = run(rewards.tolist(), groups.tolist(), lengths.tolist(), mask.tolist(), name, cfg, penalties, baselines)
    arguments = (rewards.astype(np.float64).tolist(), groups.tolist(), lengths, mask, cfg, penalties, baselines)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), reference(name, *arguments), rtol=2e-6, atol=2e-6)


def test_rewards_to_go_are_discounted_by_counted_tokens():
    cfg = RLConfig(adv_estimator="reinforce_plus_plus", gamma=0.5)
    groups, lengths = [0, 1], [3, 2]
    mask = [1.0, 0.0, 1.0, 1.0, 1.0]
    result = run([8.0, 0.0], groups, lengths, mask, "reinforce_plus_plus", cfg)
    to_go = np.array([4.0, 8.0, 8.0, 0.0, 0.0])  # the token between does not count and takes no time
    np.testing.assert_allclose(result, whitened(to_go, mask) * mask, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_backward_scan_equals_a_loop(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, 12)
    values, factors = rng.normal(size=lengths.sum()), rng.random(lengths.sum())
    expected, start = np.zeros(len(values)), 0
    for length in lengths:
        following = 0.0
        for t in range(start + length - 1, start - 1, -1):
            following = expected[t] = values[t] + factors[t] * following
        start += length
    result = backward_scan(torch.tensor(values), torch.tensor(factors), torch.tensor(lengths))
    np.testing.assert_allclose(result, expected, rtol=1e-13)


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_batches_that_teach_nothing(name):
    """Empty, all failed, all responses empty; and equal rewards in all groups give exactly 0 where all have one."""
    assert run([], [], [], name=name).shape == (0,)
    assert run([math.nan, math.nan], [0, 0], [2, 1], [0.0] * 3, name=name).tolist() == [0.0] * 3
    assert run([1.0, 0.0], [0, 0], [0, 0], name=name).shape == (0,)
    if name != "gae":  # the first tokens of a response are further from its reward
        assert torch.equal(run([0.1] * 6, [0, 0, 0, 1, 1, 1], [3] * 6, name=name), torch.zeros(18))


def test_which_estimators_wait_for_the_whole_iteration():
    """Those that do not give the same for a group, whatever other groups there are."""
    rewards, groups, lengths = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0], [0, 0, 0, 1, 1, 1], [1, 2, 3, 1, 1, 2]
    for name in ADV_ESTIMATORS:
        whole = run(rewards, groups, lengths, name=name)
        alone = run(rewards[:3], groups[:3], lengths[:3], name=name)
        assert needs_whole_batch(name) == (not torch.equal(whole[:6], alone)), name


def test_known_values():
    # mean 0.5, unbiased deviation sqrt(1/3)
    result = run([1, 0, 0, 1], [7, 7, 7, 7], [1, 2, 0, 1])
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(result, torch.tensor([a, -a, -a, a]))


def test_remax_compares_with_the_greedy_response_alone():
    rewards, greedy, lengths = [1.0, 0.5, math.nan, 2.0, 0.25], [0.5, 0.5, 0.5, math.nan, 1.0], [2, 1, 1, 1, 1]
    result = run(rewards, [0, 0, 0, 1, 2], lengths, name="remax", baselines=greedy)
    assert result.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, -0.75]
    # KL is taken off rewards alone
    result = run([1.0], [0], [2], name="remax", penalties=[0.25, 0.5], baselines=[1.0])
    assert result.tolist() == [-0.75, -0.75]


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
    with pytest.raises(ValueError, match=r"baselines\[1\] is infinite"):
        run([1.0, 1.0], [0, 0], [1, 1], name="remax", baselines=[0.0, -math.inf])
    with pytest.raises(ValueError, match="baselines has 1 entries, but rewards 2"):
        run([1.0, 1.0], [0, 0], [1, 1], name="remax", baselines=[0.0])
    with pytest.raises(ValueError, match="have 2, 1, 1 entries"):
        run([1.0, 2.0], [0], [1])
    with pytest.raises(ValueError, match="sum to 2, but mask has 1"):
        run([1.0], [0], [2], [1.0])
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        ADVANTAGES.register("grpo")(lambda inputs, cfg: inputs.mask)


def test_every_configurable_name_is_registered():
    assert set(ADV_ESTIMATORS) == set(ADVANTAGES.names())
