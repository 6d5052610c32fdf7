"""KL over the vocabulary against autograd of the textbook formula in float64, on one rank and on two gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from mindspeed_rl.algorithms.full_kl import vocab_parallel_kl

torch.set_num_threads(1)
HIDDEN = 6


def case(seed, rows=11, columns=48, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator)
    weight = torch.randn(columns, HIDDEN, generator=generator) * scale
    logits = hidden @ weight.t() + scale * torch.randn(rows, columns, generator=generator)
    return logits, hidden, weight, torch.randn(rows, generator=generator)


def textbook(logits, hidden, weight, vocab_size, temperature, upstream):
    logits = logits.double().detach().requires_grad_()
    log_p = (logits[:, :vocab_size] / temperature).log_softmax(-1)
    log_q = ((hidden.double() @ weight.double().t())[:, :vocab_size] / temperature).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    (kl * upstream).sum().backward()
    return kl.detach(), logits.grad


def run(logits, hidden, weight, upstream, group=None, vocab_size=41, temperature=0.8, chunk=4):
    leaf = logits.clone().requires_grad_()
    kl = vocab_parallel_kl(leaf, hidden, weight, group, vocab_size, temperature, chunk)
    (kl * upstream).sum().backward()
    return kl.detach(), leaf.grad


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 4096])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 10.0])
def test_value_and_gradient_on_one_rank(temperature, chunk, scale):
    logits, hidden, weight, upstream = case(0, scale=scale)
    before = logits.clone()
    kl, gradient = run(logits, hidden, weight, upstream, temperature=temperature, chunk=chunk)
    assert kl.dtype == torch.float32
    expected, expected_gradient = textbook(logits, hidden, weight, 41, temperature, upstream)
    torch.testing.assert_close(kl.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2e-5, atol=2e-5 * max(scale, 0.1))
    assert torch.equal(logits, before)
    assert not gradient[:, 41:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_have_exactly_no_kl_and_no_gradient(dtype):
    _, hidden, weight, upstream = case(1, rows=300, scale=5.0)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    kl, gradient = run(hidden @ weight.t(), hidden, weight, upstream, chunk=1000)
    assert not kl.any()
    assert not gradient.any()


def test_chunks_change_no_more_than_the_order_of_products():
    whole, parts = (run(*case(2), chunk=chunk) for chunk in (100, 3))
    for found, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_computed_in_float32():
    logits, hidden, weight, upstream = (tensor.bfloat16() for tensor in case(3))
    kl, gradient = run(logits, hidden, weight, upstream.float())
    rounded = (hidden @ weight.t()).double()  # as a model in bfloat16 gives its logits
    one = torch.eye(len(hidden))
    expected, expected_gradient = textbook(logits, one, rounded.t(), 41, 0.8, upstream.double())
    torch.testing.assert_close(kl.double(), expected, rtol=2e-5, atol=2e-5)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-2, atol=1e-4)


def test_no_rows():
    logits, hidden, weight, upstream = (tensor[:0] if len(tensor) == 11 else tensor for tensor in case(4))
    kl, gradient = run(logits, hidden, weight, upstream)
    assert kl.shape == (0,)
    assert gradient.shape == (0, 48)


def test_bad_inputs_name_the_value():
    logits, hidden, weight, _ = case(5)
    for match, arguments in {
        r"temperature = 0": (logits, hidden, weight, None, 41, 0.0),
        r"chunk = 0": (logits, hidden, weight, None, 41, 1.0, 0),
        r"logits have 48 columns on 1 ranks: fewer than vocab_size 49": (logits, hidden, weight, None, 49),
        r"logits, hidden, weight are \(11, 48\), \(10, 6\), \(48, 6\)": (logits, hidden[1:], weight, None, 41),
        r"\(48, 5\): must be \[N, V/tp\], \[N, h\], \[V/tp, h\]": (logits, hidden, weight[:, 1:], None, 41),
        r"\(47, 6\): must be": (logits, hidden, weight[1:], None, 41),
    }.items():
        with pytest.raises(ValueError, match=match):
            vocab_parallel_kl(*arguments)


VOCABULARIES = [41, 24, 48]  # padding on the last rank; nothing but padding there; no padding


def _rank(rank):
    logits, hidden, weight, upstream = case(6)
    logits, weight = logits.chunk(2, dim=1)[rank], weight.chunk(2)[rank]
    equal = hidden @ weight.t()
    group = dist.group.WORLD
    return [
        tuple(run(each, hidden, weight, upstream, group, size, chunk=99) for each in (logits, equal))
        for size in VOCABULARIES
    ]


def test_vocabulary_split_over_two_ranks_equals_one_rank():
    ranks = run_ranks(2, _rank)
    for number, vocab_size in enumerate(VOCABULARIES):
        logits, hidden, weight, upstream = case(6)
        kl, gradient = textbook(logits, hidden, weight, vocab_size, 0.8, upstream)
        parts, of_equal = zip(*(rank[number] for rank in ranks), strict=True)
        for part in parts:  # the same on every rank
            torch.testing.assert_close(part[0].double(), kl, rtol=2e-5, atol=2e-5)
            assert torch.equal(part[0], parts[0][0])
        found = torch.cat([part[1] for part in parts], dim=1)
        torch.testing.assert_close(found.double(), gradient, rtol=2e-5, atol=2e-5)
        assert not any(tensor.any() for part in of_equal for tensor in part)
