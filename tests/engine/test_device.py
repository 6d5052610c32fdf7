"""The CPU device's kernels against dense float64 references; choice of a device."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.device.npu import NpuDevice
from mindspeed_rl.device.select import make_device
from mindspeed_rl.engine.megatron import offload
from mindspeed_rl.engine.megatron.offload import HostMemory


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence, [tokens, heads, dimension], written out."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    future = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("lengths", [[5], [1, 7, 3], [4, 4], [1, 1, 1, 9]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_attention_equals_dense_attention_of_each_sequence(lengths: list[int], kv_heads: int) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    query = torch.randn(total, 4, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(total, kv_heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = torch.cat(
        [dense_attention(q, k, v) for q, k, v in zip(*(t.split(lengths) for t in (query, key, value)), strict=True)]
    )
    weight = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), (query, key, value))

    packed = [t.detach().float().requires_grad_() for t in (query, key, value)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    output = CpuDevice().varlen_attention(*packed, cu_seqlens, max(lengths))
    gradients = torch.autograd.grad((output * weight.float()).sum(), packed)
    torch.testing.assert_close(output, expected.float(), atol=1e-5, rtol=0)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=0)


def test_rms_norm_equals_its_definition() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    expected = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(CpuDevice().rms_norm(hidden, weight, 1e-6), expected)


def test_rng_state_comes_back() -> None:
    device = CpuDevice()
    device.manual_seed(7)
    state, first = device.rng_state(), torch.rand(4)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_memory_figures_are_those_of_this_process() -> None:
    device = CpuDevice()
    device.reset_peak_memory()
    before = device.memory_allocated()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert device.max_memory_allocated() - before >= 60 << 20
    assert 0 < device.memory_allocated() < device.total_memory()
    assert block.sum() == 64 << 20


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="device = 'npu': package torch_npu is not installed"):
        make_device("npu")
    assert make_device("npu", here=False).ray_resource == "NPU"  # a head node may start NPU workers


@pytest.mark.parametrize(
    ("contents", "comes_back"), [("changing", [3.0, 4.0]), ("frozen", [1.0, 2.0]), ("dropped", [0, 0])]
)
def test_host_memory_brings_back_what_it_is_told_to(contents: Any, comes_back: list[float]) -> None:
    memory = HostMemory(CpuDevice(), contents)
    owner = torch.tensor([1.0, 2.0])
    view = owner[1:]
    memory.offload([owner])
    memory.onload()
    if contents != "dropped":
        assert owner.tolist() == [1.0, 2.0]
    owner.copy_(torch.tensor([3.0, 4.0]))  # changed between two trips: a frozen one is not copied again
    memory.offload([owner])
    assert memory.is_away
    assert owner.untyped_storage().nbytes() == 0
    memory.onload()
    memory.onload()  # already there: no harm
    memory.ready()
    assert owner.tolist() == comes_back
    assert view.tolist() == comes_back[1:]


def test_host_memory_is_taken_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "PIECE_BYTES", 10)
    taken: list[int] = []
    device = CpuDevice()
    pinned = device.empty_pinned
    monkeypatch.setattr(device, "empty_pinned", lambda nbytes: (taken.append(nbytes), pinned(nbytes))[1])
    memory, owner = HostMemory(device), torch.arange(7, dtype=torch.float32).view(7, 1)
    for _ in range(2):
        memory.offload([owner])
        memory.onload()
        memory.ready()
    assert taken == 2 * [10, 10, 8]
    assert owner.flatten().tolist() == list(range(7))


def test_an_npus_profiler_is_asked_for_what_was_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A contract with torch_npu's published interface; it has never run on one."""
    asked: dict[str, Any] = {}
    profiler = ModuleType("torch_npu.profiler")
    profiler.profile = lambda **given: (asked.update(given), nullcontext())[1]  # type: ignore[attr-defined]
    profiler.ProfilerActivity = SimpleNamespace(CPU="cpu", NPU="npu")  # type: ignore[attr-defined]
    profiler.tensorboard_trace_handler = lambda folder: f"to {folder}"  # type: ignore[attr-defined]
    torch_npu = ModuleType("torch_npu")
    torch_npu.profiler = profiler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    monkeypatch.setitem(sys.modules, "torch_npu.profiler", profiler)
    with NpuDevice().profile(tmp_path / "step_1", shapes=True, memory=False, stack=True):
        pass
    assert asked == {
        "activities": ["cpu", "npu"],
        "record_shapes": True,
        "profile_memory": False,
        "with_stack": True,
        "on_trace_ready": f"to {tmp_path / 'step_1'}",
    }


def test_ranks_share_the_cores_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [CpuDevice().worker_environment(ranks)["OMP_NUM_THREADS"] for ranks in (1, 3, 16)] == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert CpuDevice().worker_environment(2)["OMP_NUM_THREADS"] == "5"
