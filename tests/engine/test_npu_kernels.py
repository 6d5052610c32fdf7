"""An NPU's kernels in the training engine: what we call them with, and that the model stays the same.

torch_npu's kernels are written out here as its reference describes them (torch_npu.npu_rotary_mul, npu_swiglu,
npu_rms_norm; torch_npu 2.7.1); they have never run on an NPU here.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import make_family
from support.ranks import run_ranks

from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.device.npu import NpuDevice
from mindspeed_rl.types import RolloutBatch

FAMILIES = ["qwen3", "llama-yarn-attention", "deepseek_v3"]  # norms of heads; a scaled embedding; latent attention
KEYS = ("use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb")


def swiglu(hidden: torch.Tensor, dim: int = -1) -> torch.Tensor:
    assert hidden.numel(), "the kernel takes no empty tensors"
    gate, up = hidden.chunk(2, dim)
    return F.silu(gate) * up


def rotary_mul(
    hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, rotary_mode: str = "half"
) -> torch.Tensor:
    _, tokens, heads, size = hidden.shape  # BSND
    assert hidden.is_contiguous()
    assert heads < 1000
    assert size < 896
    for angles in (cosines, sines):
        assert angles.shape == (1, tokens, 1, size)
        assert angles.dtype == hidden.dtype
        assert angles.abs().max() <= 1
    if rotary_mode == "half":
        first, second = hidden.chunk(2, -1)
        crossed = torch.cat((-second, first), -1)
    else:
        assert rotary_mode == "interleave"
        crossed = torch.stack((-hidden[..., 1::2], hidden[..., ::2]), -1).flatten(-2)
    return cosines * hidden + sines * crossed


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    return hidden * scale * weight, scale


def put_torch_npu_there() -> list[str]:
    """A torch_npu of these kernels; the names of those that are called."""
    called: list[str] = []
    module: Any = ModuleType("torch_npu")

    def counted(name: str, kernel: Any) -> Any:
        return lambda *args, **options: (called.append(name), kernel(*args, **options))[1]

    for name, kernel in (("npu_swiglu", swiglu), ("npu_rotary_mul", rotary_mul), ("npu_rms_norm", rms_norm)):
        setattr(module, name, counted(name, kernel))
    sys.modules["torch_npu"] = module
    return called


class NpuKernels(CpuDevice):
    """A CPU that calls what an NPU does."""

    def __init__(self) -> None:
        super().__init__()
        npu = NpuDevice()
        self.swiglu, self.rotate, self.norm = npu.swiglu, npu.rotate, npu.rms_norm

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.norm(hidden, weight, eps)


def batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    lengths = [(3, 5), (1, 9), (4, 2), (2, 7)]
    prompts, responses = (
        [torch.randint(1, 16, (pair[part],), generator=generator) for pair in lengths] for part in (0, 1)
    )
    return RolloutBatch(prompts, responses, {})


def loss(_: RolloutBatch, outputs: Any) -> tuple[torch.Tensor, MetricSet]:
    return -outputs.log_probs.mean(), MetricSet()


def train(rank: int, folder: str, cases: list[tuple[bool, dict[str, bool]]]) -> list[dict[str, Any]]:
    """Log-probs, weights after a step, and kernels that were called: (an NPU's kernels or a CPU's, keys)."""
    from mindspeed_rl.checkpoint.hf import HFWeights
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    model = ModelConfig.from_hf(json.loads(Path(folder, "config.json").read_text()))
    found = []
    for number, (npu, keys) in enumerate(cases):
        called = put_torch_npu_there()
        cfg = MegatronConfig(lr=1e-3, clip_grad=0.0, **keys)
        if number == 0:
            initialize_parallel_state(cfg)
        device = NpuKernels() if npu else CpuDevice()
        engine = MegatronEngine(cfg, model, device, 10, HFWeights(folder), with_reference=False)
        passes = [[0, 1], [2, 3]]
        log_probs = engine.score(batch(), passes, 1.0)
        engine.train_mini_batch(batch(), loss, passes, 1.0, entropy=False)
        weights = {name: tensor.clone() for name, tensor in engine.export_weights(1 << 14)}
        found.append({"log_probs": log_probs, "weights": weights, "called": set(called)})
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_the_same_in_an_npus_kernels(family: str, tmp_path: Path) -> None:
    folder = str(make_family(tmp_path / family, family))
    cases = [(False, {}), (True, dict.fromkeys(KEYS, True)), (True, dict.fromkeys(KEYS, False))]
    ((plain, fused, written_out),) = run_ranks(1, train, folder, cases)
    assert plain["called"] == written_out["called"] == set()
    assert fused["called"] == {"npu_swiglu", "npu_rotary_mul", "npu_rms_norm"}
    for other in (fused, written_out):
        torch.testing.assert_close(other["log_probs"].log_probs, plain["log_probs"].log_probs, atol=5e-6, rtol=0)
        for name, tensor in plain["weights"].items():
            # Adam's first step divides a gradient by its own size: of those as small as their rounding, by anything
            torch.testing.assert_close(other["weights"][name], tensor, atol=2e-5, rtol=0)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_switches_its_kernel(key: str, tmp_path: Path) -> None:
    folder = str(make_family(tmp_path / "qwen2", "qwen2"))
    ((found,),) = run_ranks(1, train, folder, [(True, {**dict.fromkeys(KEYS, False), key: True})])
    kernel = {"rmsnorm": "npu_rms_norm", "swiglu": "npu_swiglu", "rotary_pos_emb": "npu_rotary_mul"}
    assert found["called"] == {kernel[key.removeprefix("use_fused_")]}


def test_pairs_of_channels_turn_as_complex_numbers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    put_torch_npu_there()
    torch.manual_seed(0)
    tokens, heads, size = 5, 3, 8
    hidden, angles = torch.randn(tokens, heads, size), torch.rand(tokens, size // 2) * 6
    pairs = torch.stack(hidden.chunk(2, -1), -1)
    turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), angles)[:, None])
    both = angles.repeat(1, 2)
    rotate = NpuDevice().rotate
    assert rotate is not None
    torch.testing.assert_close(rotate(hidden, both.cos(), both.sin()), torch.cat(turned.unbind(-1), -1))
