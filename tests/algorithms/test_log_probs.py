"""Vocab-parallel log-probs and entropy against float64 log_softmax, on one rank and on two gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from mindspeed_rl.algorithms import log_probs as implementation
from mindspeed_rl.algorithms.log_probs import vocab_parallel_log_probs
from mindspeed_rl.algorithms.vocabulary import OutputLayer

torch.set_num_threads(1)
SIZE = 6


def reference(hidden, weight, targets, vocab_size, temperature, log_prob_weight, entropy_weight):
    """log p, H, and the gradients of Σ a·log p + Σ b·H by autograd in float64."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    log_p = ((hidden @ weight.t())[:, :vocab_size] / temperature).log_softmax(-1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((chosen * log_prob_weight).sum() + (entropy * entropy_weight).sum()).backward()
    return chosen.detach(), entropy.detach(), hidden.grad, weight.grad


def case(seed, rows=11, columns=48, vocab_size=41, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, SIZE, generator=generator)
    weight = torch.randn(columns, SIZE, generator=generator) * scale
    targets = torch.randint(0, vocab_size, (rows,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    weights = torch.randn(2, rows, generator=generator)
    return hidden, weight, targets, vocab_size, weights


def run(hidden, weight, targets, group, vocab_size, a, b, temperature=0.8, chunk=4):
    """What `reference` gives; a or b None: nothing is asked of that output."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
    layer = OutputLayer(group, vocab_size, temperature, chunk)
    outputs = vocab_parallel_log_probs(hidden, weight, targets, layer, True)
    sum(
        (output * factor).sum() for output, factor in zip(outputs, (a, b), strict=True) if factor is not None
    ).backward()
    return *(output.detach() for output in outputs), hidden.grad, weight.grad


def assert_close(found, expected, tolerance=2e-5):
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, 4096])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_values_and_gradients_on_one_rank(temperature, chunk, scale, dtype):
    hidden, weight, targets, vocab_size, (a, b) = case(0, scale=scale)
    found = run(hidden.to(dtype), weight.to(dtype), targets, None, vocab_size, a, b, temperature, chunk)
    assert {value.dtype for value in found} == {dtype}
    expected = reference(hidden, weight, targets, vocab_size, temperature, a, b)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for actual, wanted in zip(found, expected, strict=True):
        allowed = tolerance * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=allowed)
    assert not found[3][vocab_size:].any()


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_output_alone(which):
    hidden, weight, targets, vocab_size, (a, _) = case(1)
    factors, zero = [None, None], torch.zeros_like(a)
    factors[which] = a
    found = run(hidden, weight, targets, None, vocab_size, *factors)
    assert_close(
        found, reference(hidden, weight, targets, vocab_size, 0.8, *(zero if f is None else f for f in factors))
    )


def test_the_gradient_of_a_likely_target_is_not_lost_in_rounding():
    """Of p = 1 − 5e-4 in bfloat16, which would round 1 − p to 0 or 0.004 if it were formed from a rounded p."""
    hidden, weight = torch.eye(1, 8), torch.zeros(8, 8)
    weight[3, 0] = 9.5
    hidden, weight, target, one = hidden.bfloat16(), weight.bfloat16(), torch.tensor([3]), torch.ones(1)
    found = run(hidden, weight, target, None, 8, one, None, temperature=1.0)
    expected = reference(hidden, weight, target, 8, 1.0, one, torch.zeros(1))
    torch.testing.assert_close(found[3].double(), expected[3], rtol=1e-2, atol=0)


def test_without_entropy_the_log_probs_are_the_same():
    hidden, weight, targets, vocab_size, _ = case(2)
    layer = OutputLayer(None, vocab_size, 1.0, 4)
    plain, nothing = vocab_parallel_log_probs(hidden, weight, targets, layer)
    assert nothing is None
    with_entropy = vocab_parallel_log_probs(hidden, weight, targets, layer, with_entropy=True)
    assert torch.equal(plain, with_entropy[0])


def test_bfloat16_logits_are_worked_off_in_float32():
    hidden, weight, targets, vocab_size, (a, b) = case(3)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    found = run(hidden, weight, targets, None, vocab_size, a, b)
    rounded = hidden @ weight.t()  # as the model gives them
    one = torch.eye(len(hidden))
    log_probs, entropy, _, of_logits = reference(one, rounded.t().contiguous(), targets, vocab_size, 0.8, a, b)
    assert_close(found[:2], (log_probs, entropy))
    assert [gradient.dtype for gradient in found[2:]] == [torch.bfloat16] * 2
    of_logits = of_logits.t()
    for gradient, wanted in zip(
        found[2:], (of_logits @ weight.double(), of_logits.t() @ hidden.double()), strict=True
    ):
        torch.testing.assert_close(gradient.double(), wanted, rtol=2e-2, atol=2e-2)


def test_large_common_offset_does_not_overflow():
    hidden, weight, targets, vocab_size, (a, b) = case(4)
    hidden[:, 0], weight[:, 0] = 100.0, 100.0
    found = run(hidden, weight, targets, None, vocab_size, a, b, temperature=1.0, chunk=100)
    rounded = (hidden @ weight.t()).t().contiguous()
    expected = reference(torch.eye(len(hidden)), rounded, targets, vocab_size, 1.0, a, b)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-4, atol=1e-4)


def test_no_rows():
    hidden, weight = torch.zeros(0, SIZE), torch.ones(8, SIZE)
    none = torch.zeros(0)
    log_probs, entropy, of_hidden, of_weight = run(hidden, weight, none.long(), None, 8, none, none)
    assert log_probs.shape == entropy.shape == (0,)
    assert of_hidden.shape == (0, SIZE)
    assert of_weight.shape == (8, SIZE)
    assert not of_weight.any()


def test_bad_inputs_name_the_value():
    hidden, weight, targets = torch.zeros(2, SIZE), torch.zeros(8, SIZE), torch.tensor([0, 7])
    for match, (size, *arguments) in {
        r"targets from 0 to 7: must be in \[0, 7\)": (7, hidden, weight, targets),
        r"weight has 8 rows on 1 ranks: fewer than vocab_size 9": (9, hidden, weight, targets),
        r"hidden \(2, 6\), targets \(1,\)": (8, hidden, weight, targets[:1]),
        r"hidden and weight are \(2, 6\) and \(8, 5\): must be \[N, h\]": (8, hidden, weight[:, 1:], targets),
    }.items():
        with pytest.raises(ValueError, match=match):
            vocab_parallel_log_probs(*arguments, OutputLayer(None, size, 1.0, 4))
    for match, settings in {r"temperature = 0": (0.0, 4), r"chunk = 0": (1.0, 0)}.items():
        with pytest.raises(ValueError, match=match):
            OutputLayer(None, 8, *settings)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_what_cuda_compiles_is_one_graph(with_entropy):
    """Of the same bits if it is run step by step."""
    hidden, weight, targets, _, (a, b) = case(6)
    logits, normaliser, entropy = hidden @ weight.t(), torch.full_like(a, 3.0), b.abs()
    of_entropy = (b, entropy) if with_entropy else (None, None)
    for function, arguments in (
        (implementation._sums, (logits, targets, 0.8, with_entropy)),
        (implementation._gradient, (logits, normaliser, a, *of_entropy, 0.8)),
    ):
        compiled = torch.compile(function, backend="eager", fullgraph=True)(*arguments)
        plain = function(*arguments)
        if isinstance(plain, torch.Tensor):
            plain, compiled = (plain,), (compiled,)
        assert all(torch.equal(x, y) for x, y in zip(plain, compiled, strict=True))


SPLIT_CASES = [
    (41, torch.float32),  # padding on the last rank
    (24, torch.float32),  # the last rank holds nothing but padding
    (48, torch.bfloat16),  # no padding
]


def _rank(rank):
    results = []
    for vocab_size, dtype in SPLIT_CASES:
        hidden, weight, targets, _, (a, b) = case(5, vocab_size=vocab_size)
        own = weight.to(dtype).chunk(2)[rank]
        results.append(run(hidden.to(dtype), own, targets, dist.group.WORLD, vocab_size, a, b))
    return results


def test_vocabulary_split_over_two_ranks_equals_one_rank():
    ranks = run_ranks(2, _rank)
    for (vocab_size, dtype), *parts in zip(SPLIT_CASES, *ranks, strict=True):
        hidden, weight, targets, _, (a, b) = case(5, vocab_size=vocab_size)
        whole = run(hidden.to(dtype), weight.to(dtype), targets, None, vocab_size, a, b)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        for part in parts:  # the same on every rank
            assert all(torch.equal(x, y) for x, y in zip(part[:3], parts[0][:3], strict=True))
            assert_close(part[:2], whole[:2], 1e-5)
            assert_close(part[2:3], whole[2:3], tolerance)
        assert_close([torch.cat([part[3] for part in parts])], whole[3:], tolerance)
