"""Aggregation against loops over sequences, and its invariance to how the batch is split."""

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.aggregation import aggregate, count
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.types import Denominators

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
HORIZON = 13.0


def ragged_batch(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, int(rng.integers(2, 12)))
    lengths[0] = 5
    mask = (rng.random(lengths.sum()) < 0.7).astype(np.float64)
    mask[0] = 1
    if len(lengths) > 2:
        mask[lengths[:2].sum() : lengths[:3].sum()] = 0  # a sequence that does not count at all
    return rng.normal(size=lengths.sum()), mask, lengths


def reference(values, mask, lengths, mode):
    ends = np.cumsum(lengths)
    sequences = [(values[e - n : e], mask[e - n : e]) for n, e in zip(lengths, ends, strict=True)]
    sequences = [(v, m) for v, m in sequences if m.sum() > 0]
    if mode == "token-mean":
        return sum((v * m).sum() for v, m in sequences) / sum(m.sum() for _, m in sequences)
    if mode == "seq-mean-token-sum":
        return np.mean([(v * m).sum() for v, m in sequences])
    if mode == "seq-mean-token-mean":
        return np.mean([(v * m).sum() / m.sum() for v, m in sequences])
    return np.mean([(v * m).sum() / HORIZON for v, m in sequences])


def tensors(values, mask, lengths):
    return torch.tensor(values, dtype=torch.float64), torch.tensor(mask), torch.tensor(lengths)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_equals_reference(mode, seed):
    batch = ragged_batch(seed)
    values, mask, lengths = tensors(*batch)
    result = aggregate(values, mask, lengths, mode, count(mask, lengths), HORIZON)
    np.testing.assert_allclose(result.item(), reference(*batch, mode), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_do_not_depend_on_micro_batches(mode, micro_batch, seed):
    values, mask, lengths = tensors(*ragged_batch(seed))
    denominators = count(mask, lengths)
    whole = values.clone().requires_grad_()
    loss = aggregate(whole.sin(), mask, lengths, mode, denominators, HORIZON)
    loss.backward()
    split, total = values.clone().requires_grad_(), 0.0
    offsets = [0, *lengths.cumsum(0).tolist()]
    for start in range(0, len(lengths), micro_batch):
        stop = min(start + micro_batch, len(lengths))
        part = slice(offsets[start], offsets[stop])
        share = aggregate(split[part].sin(), mask[part], lengths[start:stop], mode, denominators, HORIZON)
        share.backward()
        total += share.item()
    assert total == pytest.approx(loss.item(), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-6, atol=1e-9)


def test_counts_add_up_over_ranks():
    mask = torch.tensor([1.0, 0, 1, 0, 0, 1])
    lengths = torch.tensor([2, 1, 0, 2, 1])  # of the five, the third is empty and the fourth wholly masked
    assert count(mask, lengths) == Denominators(tokens=3, sequences=3)
    assert count(mask[:3], lengths[:2]) == Denominators(tokens=2, sequences=2)
    assert count(mask[3:], lengths[2:]) == Denominators(tokens=1, sequences=1)


@pytest.mark.parametrize("mode", MODES)
def test_masked_values_do_not_matter(mode):
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    mask, lengths = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2, 1])
    loss = aggregate(values, mask, lengths, mode, count(mask, lengths), HORIZON)
    loss.backward()
    assert loss.item() == pytest.approx(1 / HORIZON if mode.endswith("norm") else 1.0)
    assert values.grad[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_count_is_zero(mode):
    for lengths, tokens in ([2, 1], 3), ([0, 0], 0), ([], 0):
        values, mask = torch.ones(tokens, requires_grad=True), torch.zeros(tokens)
        lengths = torch.tensor(lengths, dtype=torch.int64)
        loss = aggregate(values, mask, lengths, mode, count(mask, lengths), HORIZON)
        loss.backward()
        assert loss.item() == 0
        assert not values.grad.any()


def test_bad_inputs():
    args = torch.ones(1), torch.ones(1), torch.tensor([1])
    with pytest.raises(ValueError, match="mode = 'mean' is unknown; known: token-mean"):
        aggregate(*args, "mean", Denominators(1, 1))
    with pytest.raises(ValueError, match="horizon = None"):
        aggregate(*args, "seq-mean-token-sum-norm", Denominators(1, 1))


def test_every_configurable_mode_is_tested():
    assert list(RLConfig.model_fields["loss_agg_mode"].annotation.__args__) == MODES
