"""The simulated NPU behaves as a device does, and `device/npu.py` on it computes what `device/cpu.py` does."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.device.npu import NpuDevice
from mindspeed_rl.engine.megatron.bootstrap import prepare
from tests.support.simulated_npu import Ranks, ranks

ROOT = Path(__file__).resolve().parents[2]
NPU = "npu"


@pytest.fixture(scope="module")
def npus() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


def _tensors() -> None:
    device = NpuDevice()
    assert (device.available(), device.count(), str(device.current())) == (True, 1, "npu:0")
    x = torch.arange(6.0, device=NPU).view(2, 3)
    assert (x.device.type, x.is_npu, x.is_cpu) == (NPU, True, False)
    assert (x + 1).t().contiguous().tolist() == [[1, 4], [2, 5], [3, 6]]
    with pytest.raises(RuntimeError, match="device"):
        x + torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="aten::mm was given some of the cpu"):
        x @ torch.ones(3, 2)
    with pytest.raises(TypeError, match="convert npu"):
        x.numpy()
    # views share memory however they are made: by torch for all devices, here, or by the CPU's operators
    view, windows = x[:, 1:], x.unfold(1, 2, 1)
    x[0, 1] = 7
    view[1] *= 2
    assert x.tolist() == [[0, 7, 2], [3, 8, 10]]
    assert windows[0].tolist() == [[0, 7], [7, 2]]
    assert x[x > 5].tolist() == [7, 8, 10]
    assert x[torch.tensor([1, 0], device=NPU)].tolist() == [[3, 8, 10], [0, 7, 2]]
    values, indices = x.flatten().sort(descending=True)
    assert (values.device.type, indices.tolist()) == (NPU, [5, 4, 1, 3, 2, 0])
    out = torch.empty(0, device=NPU)
    assert torch.cat([x, x], out=out) is out
    assert (out.shape, out.device.type, out[3].tolist()) == ((4, 3), NPU, [3, 8, 10])
    torch._foreach_add_([x, out], 1)
    assert (x[0].tolist(), out[0].tolist()) == ([1, 8, 3], [1, 8, 3])


def _storages() -> None:
    """What `engine/megatron/offload.py` does to them."""
    device = NpuDevice()
    owner = torch.arange(4.0, device=NPU)
    view, before = owner[2:], device.memory_allocated()
    raw = torch.empty(0, dtype=torch.uint8, device=NPU).set_(owner.untyped_storage())
    assert (raw.device.type, len(raw), raw.view(torch.float32).tolist()) == (NPU, 16, [0, 1, 2, 3])
    host = device.empty_pinned(16)
    assert (host.is_pinned(), torch.empty(16).is_pinned()) == (True, False)
    host.copy_(raw, non_blocking=True)
    owner.untyped_storage().resize_(0)
    assert device.memory_allocated() == before - 16
    owner.untyped_storage().resize_(16)
    torch.empty(0, dtype=torch.uint8, device=NPU).set_(owner.untyped_storage()).copy_(host)
    assert view.tolist() == [2, 3]


def _memory() -> None:
    device = NpuDevice()
    device.reset_peak_memory()
    before, free = device.memory_allocated(), device.free_memory()
    block = torch.empty(1 << 20, dtype=torch.uint8, device=NPU)
    assert device.memory_allocated() - before == free - device.free_memory() == len(block)
    del block
    assert device.memory_allocated() == before
    assert device.max_memory_allocated() == before + (1 << 20)
    assert before < device.total_memory()


def _random_numbers() -> None:
    device = NpuDevice()
    device.manual_seed(7)
    state = device.rng_state()
    first, on_host = torch.rand(3, device=NPU), torch.rand(3)
    assert torch.equal(first.cpu(), on_host)  # of one seed and one kind of generator, but of a state of its own
    second = torch.randn(3, device=NPU)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=NPU), first)
    assert torch.equal(torch.randn(3, device=NPU), second)
    generator = torch.Generator(device=NPU).manual_seed(7)
    assert torch.equal(torch.rand(3, generator=generator, device=NPU), first)


def _streams() -> None:
    device = NpuDevice()
    main, side = torch.npu.current_stream(), device.side_stream()  # type: ignore[attr-defined]
    assert main != side
    with device.queue_on(side):
        assert torch.npu.current_stream() == side  # type: ignore[attr-defined]
        result = torch.ones(2, device=NPU).cumsum(0)
    device.wait_stream(side)
    device.synchronize()
    assert torch.npu.current_stream() == main  # type: ignore[attr-defined]
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))  # type: ignore[attr-defined]
    start.record()
    end.record()
    assert (result.tolist(), start.elapsed_time(end) >= 0) == ([1, 2], True)


def _autograd() -> None:
    """The same gradients as on the CPU, by the device's own thread, with a hook and an optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 8), torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 5)
    )
    copy = torch.nn.Sequential(
        torch.nn.Embedding(5, 8), torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 5)
    )
    copy.load_state_dict(model.state_dict())
    copy.to(NPU)
    seen: list[str] = []
    next(copy.parameters()).register_hook(lambda gradient: seen.append(gradient.device.type))
    tokens = torch.tensor([[0, 3, 3, 1]])
    for module, where in ((model, "cpu"), (copy, NPU)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            logits = module(tokens.to(where))[0]
            torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:].to(where)).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    assert seen == [NPU, NPU]
    for expected, found in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("check", [_tensors, _storages, _memory, _random_numbers, _streams, _autograd])
def test_it_behaves_as_a_device(check: Any, npus: Ranks) -> None:
    npus.run(check)


def _fused(lengths: list[int], kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 16), (kv_heads, 16), (kv_heads, 16))
    packed = [torch.randn(sum(lengths), *size, generator=generator) for size in sizes]
    hidden, weight = torch.randn(3, 16, generator=generator), torch.randn(16, generator=generator)
    found: list[list[torch.Tensor]] = []
    for device in (CpuDevice(), NpuDevice()):
        where = device.current()
        inputs = [t.to(where).requires_grad_() for t in (*packed, hidden, weight)]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(where)
        attended = device.varlen_attention(*inputs[:3], cu_seqlens, max(lengths), 0.3)
        normed = device.rms_norm(*inputs[3:], 1e-5)
        gradients = torch.autograd.grad(attended.square().sum() + normed.pow(3).sum(), inputs)
        found.append([t.detach().cpu() for t in (attended, normed, *gradients)])
    for expected, result in zip(*found, strict=True):
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[5], [1, 7, 3]])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_fused_operators_compute_what_the_cpu_does(lengths: list[int], kv_heads: int, npus: Ranks) -> None:
    npus.run(_fused, lengths, kv_heads)


def _refusals() -> None:
    import torch_npu

    x, mask = torch.zeros(4, 2, 16, device=NPU), torch.ones(2048, 2048, dtype=torch.bool, device=NPU)
    settings = {"input_layout": "TND", "atten_mask": mask, "sparse_mode": 3}

    def attend(message: str, heads: int = 2, ends: Any = (1, 4), **changed: Any) -> None:
        given = {**settings, "actual_seq_qlen": ends, "actual_seq_kvlen": ends, **changed}
        with pytest.raises(RuntimeError, match=message):
            torch_npu.npu_fusion_attention(x, x, x, heads, **given)

    attend("head_num is 3", heads=3)
    attend("ends at 4", ends=(1, 3))
    attend("is cumulative", ends=(5, 4))
    attend("list of int", ends=torch.tensor([1, 4]))
    attend("of shape", atten_mask=mask[:4, :4])
    attend("bool or uint8", atten_mask=mask.float())
    attend("tensor of cpu", atten_mask=mask.cpu())
    attend("only TND", sparse_mode=2)


def test_fused_operators_refuse_what_the_real_ones_do(npus: Ranks) -> None:
    npus.run(_refusals)


def _collectives() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    assert dist.get_backend() == "hccl"
    mine = torch.arange(4.0, device=NPU) + 10 * rank
    total = mine.clone()
    dist.all_reduce(total)
    assert total.tolist() == [10, 12, 14, 16]
    parts = [torch.empty(2, device=NPU) for _ in range(2)]
    dist.all_gather(parts, mine[:2])
    assert torch.stack(parts).tolist() == [[0, 1], [10, 11]]
    part = torch.empty(2, device=NPU)
    dist.reduce_scatter_tensor(part, mine)
    assert part.tolist() == [[10, 12], [14, 16]][rank]
    exchanged = torch.empty(4, device=NPU)
    sizes = [1, 3] if rank else [3, 1]
    dist.all_to_all_single(exchanged, mine, sizes, sizes, async_op=True).wait()
    assert exchanged.tolist() == [[0, 1, 2, 10], [3, 11, 12, 13]][rank]
    received = torch.empty(4, device=NPU)
    other = 1 - rank
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, received, other)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert received.tolist() == [value + 10 * other for value in range(4)]
    dist.broadcast(received, 0)
    said: list[Any] = [rank]
    dist.broadcast_object_list(said, 1)
    dist.barrier()
    assert (received.tolist(), said) == ([10, 11, 12, 13], [1])
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(1))
    of_one = dist.new_group([0])
    assert of_one is not None


def test_hccl_is_a_backend_of_the_npu_alone(npus: Ranks) -> None:
    npus.run(_collectives)


def _profile(folder: str) -> None:
    path = Path(folder) / str(torch.distributed.get_rank())
    with NpuDevice().profile(path, shapes=True, memory=False, stack=False):
        torch.ones(2, device=NPU).sum()
    assert "aten::sum" in (path / "trace_view.json").read_text()


def test_a_profile_is_a_folder(npus: Ranks, tmp_path: Path) -> None:
    npus.run(_profile, str(tmp_path))


USES_CUDA = """
import torch
torch.cuda.synchronize()
found = [torch.ones(1, device="cuda"), torch.ones(1).to("cuda:0"), torch.ones(1).cuda()]
"""


def _redirection(folder: str) -> None:
    report = f"{folder}/{torch.distributed.get_rank()}"
    os.environ["SIMULATED_NPU_REPORT"] = report
    prepare(NpuDevice(), MegatronConfig())
    ours = ROOT / "mindspeed_rl" / "made_up.py"
    names: dict[str, Any] = {}
    for _ in range(2):
        exec(compile(USES_CUDA, str(ours), "exec"), names)
    assert [(str(t.device), t.type()) for t in names["found"]] == 3 * [("npu:0", "torch.cuda.FloatTensor")]
    torch.cuda.synchronize()  # of neither package
    lines = [line.removeprefix(f"mindspeed_rl {ours}:") for line in Path(report).read_text().splitlines()]
    assert lines == ["3 torch.cuda.synchronize", "4 device 'cuda'", "4 device 'cuda:0'", "4 .cuda()"]


def test_uses_of_cuda_reach_the_npu_and_are_noted_once(npus: Ranks, tmp_path: Path) -> None:
    """Last in this file: MindSpeed's adaptor changes torch for good."""
    npus.run(_redirection, str(tmp_path))
