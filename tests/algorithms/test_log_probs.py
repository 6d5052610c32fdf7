"""Vocab-parallel log-probs and entropy against float64 log_softmax, on one rank and on two gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from mindspeed_rl.algorithms.log_probs import vocab_parallel_log_probs

torch.set_num_threads(1)


def reference(logits, targets, vocab_size, temperature, log_prob_weight, entropy_weight):
    """log p, H, and the gradient of Σ a·log p + Σ b·H by autograd in float64."""
    logits = logits.double().detach().requires_grad_()
    log_p = (logits[:, :vocab_size] / temperature).log_softmax(-1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((chosen * log_prob_weight).sum() + (entropy * entropy_weight).sum()).backward()
    return chosen.detach(), entropy.detach(), logits.grad


def case(seed, rows=11, columns=48, vocab_size=41, scale=5.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator) * scale
    targets = torch.randint(0, vocab_size, (rows,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    weights = torch.randn(2, rows, generator=generator)
    return logits, targets, vocab_size, weights


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, 4096])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_values_and_gradient_on_one_rank(temperature, chunk, scale):
    logits, targets, vocab_size, (a, b) = case(0, scale=scale)
    before = logits.clone()
    leaf = logits.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(leaf, targets, None, vocab_size, temperature, True, chunk)
    assert log_probs.dtype == entropy.dtype == torch.float32
    ((log_probs * a).sum() + (entropy * b).sum()).backward()
    expected = reference(before, targets, vocab_size, temperature, a, b)
    for actual, wanted in zip((log_probs, entropy, leaf.grad), expected, strict=True):
        torch.testing.assert_close(actual.detach().double(), wanted, rtol=2e-5, atol=2e-5)
    assert torch.equal(leaf.detach(), before)
    assert not leaf.grad[:, vocab_size:].any()


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_gradient_of_one_output_alone(which):
    logits, targets, vocab_size, (a, _) = case(1)
    zero = torch.zeros_like(a)
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(leaf, targets, None, vocab_size, with_entropy=True)
    ((log_probs if which == "log_probs" else entropy) * a).sum().backward()
    weights = (a, zero) if which == "log_probs" else (zero, a)
    wanted = reference(logits, targets, vocab_size, 1.0, *weights)[2]
    torch.testing.assert_close(leaf.grad.double(), wanted, rtol=2e-5, atol=2e-6)


def test_without_entropy_the_log_probs_are_the_same():
    logits, targets, vocab_size, _ = case(2)
    plain, nothing = vocab_parallel_log_probs(logits, targets, None, vocab_size)
    assert nothing is None
    assert torch.equal(plain, vocab_parallel_log_probs(logits, targets, None, vocab_size, with_entropy=True)[0])


def test_chunks_change_no_bit_and_bfloat16_is_computed_in_float32():
    logits, targets, vocab_size, (a, b) = case(3)
    logits = logits.bfloat16()
    results = []
    for chunk in 2, 100:
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = vocab_parallel_log_probs(leaf, targets, None, vocab_size, 0.9, True, chunk)
        ((log_probs * a).sum() + (entropy * b).sum()).backward()
        results.append((log_probs.detach(), entropy.detach(), leaf.grad))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    wanted = reference(logits, targets, vocab_size, 0.9, a, b)
    torch.testing.assert_close(results[0][0].double(), wanted[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(results[0][1].double(), wanted[1], rtol=2e-5, atol=2e-5)
    assert results[0][2].dtype == torch.bfloat16
    torch.testing.assert_close(results[0][2].double(), wanted[2], rtol=1e-2, atol=1e-4)


def test_large_common_offset_does_not_overflow():
    logits, targets, vocab_size, _ = case(4)
    shifted, _ = vocab_parallel_log_probs(logits.double().add(1e4).float(), targets, None, vocab_size)
    exact = reference(logits.double().add(1e4).float(), targets, vocab_size, 1.0, 1.0, 0.0)[0]
    torch.testing.assert_close(shifted.double(), exact, rtol=1e-5, atol=1e-5)


def test_no_rows():
    leaf = torch.zeros(0, 8, requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(leaf, torch.zeros(0, dtype=torch.int64), None, 8, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert leaf.grad.shape == (0, 8)


def test_bad_inputs_name_the_value():
    logits, targets = torch.zeros(2, 8), torch.tensor([0, 7])
    for match, arguments in {
        r"temperature = 0": (logits, targets, None, 8, 0.0),
        r"targets from 0 to 7: must be in \[0, 7\)": (logits, targets, None, 7),
        r"logits have 8 columns on 1 ranks: fewer than vocab_size 9": (logits, targets, None, 9),
        r"logits \(2, 8\), targets \(1,\)": (logits, targets[:1], None, 8),
        r"chunk = 0": (logits, targets, None, 8, 1.0, False, 0),
    }.items():
        with pytest.raises(ValueError, match=match):
            vocab_parallel_log_probs(*arguments)


SPLIT_CASES = [
    (41, torch.float32),  # padding on the last rank
    (24, torch.float32),  # the last rank holds nothing but padding
    (48, torch.bfloat16),  # no padding
]


def run_weighted(logits, targets, group, vocab_size, a, b):
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(leaf, targets, group, vocab_size, 0.8, True, chunk=4)
    ((log_probs * a).sum() + (entropy * b).sum()).backward()
    return log_probs.detach(), entropy.detach(), leaf.grad


def _rank(rank):
    results = []
    for vocab_size, dtype in SPLIT_CASES:
        logits, targets, _, (a, b) = case(5, vocab_size=vocab_size)
        own = logits.to(dtype).chunk(2, dim=1)[rank]
        results.append(run_weighted(own, targets, dist.group.WORLD, vocab_size, a, b))
    return results


def test_vocabulary_split_over_two_ranks_equals_one_rank():
    ranks = run_ranks(2, _rank)
    for (vocab_size, dtype), *parts in zip(SPLIT_CASES, *ranks, strict=True):
        logits, targets, _, (a, b) = case(5, vocab_size=vocab_size)
        log_probs, entropy, gradient = run_weighted(logits.to(dtype), targets, None, vocab_size, a, b)
        exact = reference(logits.to(dtype), targets, vocab_size, 0.8, a, b)
        for part in parts:  # the same on every rank
            torch.testing.assert_close(part[0], log_probs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(part[1], entropy, rtol=1e-5, atol=1e-5)
            assert torch.equal(part[0], parts[0][0])
            torch.testing.assert_close(part[0].double(), exact[0], rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(part[1].double(), exact[1], rtol=2e-5, atol=2e-5)
        tolerance = {} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(torch.cat([part[2] for part in parts], dim=1), gradient, **tolerance)
