"""Ascend NPUs, through torch_npu and MindSpeed. Written to their published interfaces; never run on an NPU so far."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_rl.device.base import BlockAttention, Rotate, Swiglu


def _npu() -> Any:
    import torch_npu  # noqa: F401  (registers torch.npu)

    return torch.npu  # type: ignore[attr-defined]


def _swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """See `mindspeed_rl.device.base.Swiglu`. The kernel takes no empty tensors, as of an expert without tokens."""
    import torch_npu

    if not len(gate_and_up):
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    fused: torch.Tensor = torch_npu.npu_swiglu(gate_and_up, dim=-1)
    return fused


def _rotate(hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """See `mindspeed_rl.device.base.Rotate`. The kernel's layout BSND with a batch of one limits no tokens."""
    import torch_npu

    angles = (cosines[None, :, None], sines[None, :, None])  # [1, T, 1, d]
    rotated: torch.Tensor = torch_npu.npu_rotary_mul(hidden[None].contiguous(), *angles, rotary_mode="half")
    return rotated[0]


class NpuDevice:
    """See `mindspeed_rl.device.base.Device`."""

    name = "npu"
    collectives_backend = "hccl"
    ray_resource: str | None = "NPU"
    visible_devices_variable: str | None = "ASCEND_RT_VISIBLE_DEVICES"
    rollout_can_sleep = True
    groups_matmuls = False
    # not built: the fused kernel gives the softmax's maximum and sum, not a log-sum-exp
    block_attention: BlockAttention | None = None

    swiglu: Swiglu | None
    rotate: Rotate | None

    def __init__(self) -> None:
        self.swiglu, self.rotate = _swiglu, _rotate
        self._causal_mask: torch.Tensor | None = None

    def install(self) -> None:
        """What adapts Megatron, MindSpeed, is given the run's arguments by `engine.megatron.bootstrap`."""
        _npu()

    def available(self) -> bool:
        return find_spec("torch_npu") is not None and bool(_npu().is_available())

    def count(self) -> int:
        return int(_npu().device_count())

    def select(self, index: int) -> torch.device:
        _npu().set_device(index)
        return self.current()

    def current(self) -> torch.device:
        return torch.device("npu", _npu().current_device())

    def synchronize(self) -> None:
        _npu().synchronize()

    def empty_cache(self) -> None:
        _npu().empty_cache()

    def memory_allocated(self) -> int:
        return int(_npu().memory_allocated())

    def max_memory_allocated(self) -> int:
        return int(_npu().max_memory_allocated())

    def reset_peak_memory(self) -> None:
        _npu().reset_peak_memory_stats()

    def free_memory(self) -> int:
        return int(_npu().mem_get_info()[0])

    def total_memory(self) -> int:
        return int(_npu().get_device_properties(_npu().current_device()).total_memory)

    def peak_flops(self, bf16: bool) -> float | None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        _npu().manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"host": torch.get_rng_state(), "device": _npu().get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["host"])
        _npu().set_rng_state(state["device"])

    def side_stream(self) -> Any:
        return _npu().Stream()

    def queue_on(self, stream: Any) -> AbstractContextManager[Any]:
        stream.wait_stream(_npu().current_stream())
        return _npu().stream(stream)

    def wait_stream(self, stream: Any) -> None:
        _npu().current_stream().wait_stream(stream)

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8).pin_memory()

    def varlen_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float | None = None,
        starts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Fused attention in TND layout; sparse mode 3 is right-down causal and takes a fixed 2048 × 2048 mask."""
        import torch_npu

        if self._causal_mask is None:
            self._causal_mask = torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=query.device), diagonal=1)
        ends = list((cu_seqlens.tolist() if starts is None else starts)[1:])
        return torch_npu.npu_fusion_attention(
            query,
            key,
            value,
            query.shape[1],
            input_layout="TND",
            atten_mask=self._causal_mask,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=3,
        )[0]

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        import torch_npu

        return torch_npu.npu_rms_norm(hidden, weight, epsilon=eps)[0]

    def profile(self, path: Path, shapes: bool, memory: bool, stack: bool) -> AbstractContextManager[Any]:
        from torch_npu import profiler

        # a folder of files, for MindStudio Insight and TensorBoard
        profile: AbstractContextManager[Any] = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
            record_shapes=shapes,
            profile_memory=memory,
            with_stack=stack,
            on_trace_ready=profiler.tensorboard_trace_handler(str(path)),
        )
        return profile

    def worker_environment(self, ranks: int) -> dict[str, str]:
        # as on CUDA; MindSpeed checks it
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def vllm_environment(self, kv_cache_gib: int, eager: bool) -> dict[str, str]:
        # weights in the NPU's own format could not be overwritten in place
        return {"VLLM_ASCEND_ENABLE_NZ": "0"}
