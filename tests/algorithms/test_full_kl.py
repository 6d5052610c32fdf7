"""KL over the vocabulary against autograd of the textbook formula in float64, on one rank and on two gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from mindspeed_rl.algorithms import full_kl
from mindspeed_rl.algorithms.full_kl import vocab_parallel_kl
from mindspeed_rl.algorithms.vocabulary import OutputLayer

torch.set_num_threads(1)
SIZE = 6


def case(seed, rows=11, columns=48, scale=1.0):
    """Policy, reference and what the KLs are multiplied with: hidden, weight, hidden, weight, [rows]."""
    generator = torch.Generator().manual_seed(seed)
    of_reference = torch.randn(rows, SIZE, generator=generator), torch.randn(columns, SIZE, generator=generator)
    hidden, weight = (each + torch.randn(each.shape, generator=generator) for each in of_reference)
    return hidden, weight * scale, of_reference[0], of_reference[1] * scale, torch.randn(rows, generator=generator)


def textbook(hidden, weight, reference_hidden, reference_weight, upstream, vocab_size=41, temperature=0.8):
    hidden, weight = (tensor.double().detach().requires_grad_() for tensor in (hidden, weight))
    log_p = ((hidden @ weight.t())[:, :vocab_size] / temperature).log_softmax(-1)
    of_reference = reference_hidden.double() @ reference_weight.double().t()
    log_q = (of_reference[:, :vocab_size] / temperature).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    (kl * upstream).sum().backward()
    return kl.detach(), hidden.grad, weight.grad


def run(hidden, weight, *of_reference, group=None, vocab_size=41, temperature=0.8, chunk=4):
    *of_reference, upstream = of_reference
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
    layer = OutputLayer(group, vocab_size, temperature, chunk)
    kl = vocab_parallel_kl(hidden, weight, *of_reference, layer)
    (kl * upstream).sum().backward()
    return kl.detach(), hidden.grad, weight.grad


def assert_close(found, expected, tolerance=2e-5):
    for actual, wanted in zip(found, expected, strict=True):
        allowed = tolerance * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 4096])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0])
def test_values_and_gradients_on_one_rank(temperature, chunk, scale, dtype):
    inputs = [tensor.to(dtype) for tensor in case(0, scale=scale)]
    found = run(*inputs, temperature=temperature, chunk=chunk)
    assert {value.dtype for value in found} == {dtype}
    assert_close(found, textbook(*inputs, temperature=temperature), 1e-12 if dtype == torch.float64 else 2e-5)
    assert not found[2][41:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_have_exactly_no_kl_and_no_gradient(dtype):
    hidden, weight, *_, upstream = case(1, rows=300, scale=5.0)
    model = hidden.to(dtype), weight.to(dtype)
    assert not any(found.any() for found in run(*model, *model, upstream, chunk=1000))


def test_chunks_change_no_more_than_the_order_of_products():
    whole, parts = (run(*case(2), chunk=chunk) for chunk in (100, 3))
    assert_close(parts, whole, 1e-5)


def test_bfloat16_logits_are_worked_off_in_float32():
    hidden, weight, *of_reference = (tensor.bfloat16() for tensor in case(3))
    upstream = of_reference.pop().float()
    kl, of_hidden, of_weight = run(hidden, weight, *of_reference, upstream)
    assert of_hidden.dtype == of_weight.dtype == torch.bfloat16
    one = torch.eye(len(hidden))  # logits rounded, as a model in bfloat16 gives them
    rounded = [(a @ b.t()).t().contiguous() for a, b in ((hidden, weight), of_reference)]
    expected, _, of_logits = textbook(one, rounded[0], one, rounded[1], upstream)
    torch.testing.assert_close(kl.double(), expected, rtol=2e-5, atol=2e-5)
    of_logits = of_logits.t()
    assert_close((of_hidden, of_weight), (of_logits @ weight.double(), of_logits.t() @ hidden.double()), 2e-2)


def test_no_rows():
    hidden, weight, reference_hidden, reference_weight, upstream = case(4)
    kl, of_hidden, of_weight = run(hidden[:0], weight, reference_hidden[:0], reference_weight, upstream[:0])
    assert kl.shape == (0,)
    assert of_hidden.shape == (0, SIZE)
    assert not of_weight.any()


def test_bad_inputs_name_the_value():
    hidden, weight, *of_reference, _ = case(5)
    policy, reference = (hidden, weight), tuple(of_reference)
    for match, (size, *arguments) in {
        r"weight has 48 rows on 1 ranks: fewer than vocab_size 49": (49, *policy, *reference),
        r"policy and reference have 11 and 10 rows, 48 and 48": (41, *policy, reference[0][1:], reference[1]),
        r"11 and 11 rows, 48 and 47 columns": (41, *policy, reference[0], reference[1][1:]),
        r"hidden and weight are \(11, 6\) and \(48, 5\)": (41, hidden, weight[:, 1:], *reference),
    }.items():
        with pytest.raises(ValueError, match=match):
            vocab_parallel_kl(*arguments, OutputLayer(None, size, 1.0, 4))


def test_what_cuda_compiles_is_one_graph():
    """Of the same bits if it is run step by step."""
    hidden, weight, reference_hidden, reference_weight, upstream = case(7)
    logits = hidden @ weight.t(), reference_hidden @ reference_weight.t()
    sums = torch.compile(full_kl._sums, backend="eager", fullgraph=True)(*logits, 0.8)
    assert all(torch.equal(x, y) for x, y in zip(sums, full_kl._sums(*logits, 0.8), strict=True))
    arguments = *logits, upstream + 3, upstream + 4, upstream.abs(), upstream, 0.8
    gradient = torch.compile(full_kl._gradient, backend="eager", fullgraph=True)(*arguments)
    assert torch.equal(gradient, full_kl._gradient(*arguments))


VOCABULARIES = [41, 24, 48]  # padding on the last rank; nothing but padding there; no padding


def _rank(rank):
    hidden, weight, reference_hidden, reference_weight, upstream = case(6)
    weight, reference_weight = (tensor.chunk(2)[rank] for tensor in (weight, reference_weight))
    policy, reference = (hidden, weight), (reference_hidden, reference_weight)
    return [
        tuple(
            run(*policy, *other, upstream, group=dist.group.WORLD, vocab_size=size, chunk=99)
            for other in (reference, policy)
        )
        for size in VOCABULARIES
    ]


def test_vocabulary_split_over_two_ranks_equals_one_rank():
    ranks = run_ranks(2, _rank)
    for number, vocab_size in enumerate(VOCABULARIES):
        kl, of_hidden, of_weight = textbook(*case(6), vocab_size=vocab_size)
        parts, of_equal = zip(*(rank[number] for rank in ranks), strict=True)
        for part in parts:  # the same on every rank
            assert_close(part[:2], (kl, of_hidden))
            assert all(torch.equal(x, y) for x, y in zip(part[:2], parts[0][:2], strict=True))
        assert_close([torch.cat([part[2] for part in parts])], [of_weight])
        assert not any(tensor.any() for part in of_equal for tensor in part)
