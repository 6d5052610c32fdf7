"""NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mindspeed_rl.device.base import BlockAttention, Rotate, Swiglu
from mindspeed_rl.device.profiler import torch_profile

# NVIDIA data sheets, dense
PEAK_BF16_FLOPS = {"H200": 989.4e12, "H100": 989.4e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}


class CudaDevice:
    """See `mindspeed_rl.device.base.Device`."""

    name = "cuda"
    collectives_backend = "nccl"
    ray_resource: str | None = "GPU"
    visible_devices_variable: str | None = "CUDA_VISIBLE_DEVICES"
    rollout_can_sleep = True
    swiglu: Swiglu | None = None
    rotate: Rotate | None = None
    groups_matmuls = True
    block_attention: BlockAttention | None

    def __init__(self) -> None:
        self.block_attention = _FlashAttention()

    def install(self) -> None:
        """Megatron-core is written for CUDA: nothing to adapt."""

    def available(self) -> bool:
        return torch.cuda.is_available()

    def count(self) -> int:
        return torch.cuda.device_count()

    def select(self, index: int) -> torch.device:
        torch.cuda.set_device(index)
        return self.current()

    def current(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def max_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def total_memory(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def peak_flops(self, bf16: bool) -> float | None:
        name = torch.cuda.get_device_name()
        return next((flops for chip, flops in PEAK_BF16_FLOPS.items() if chip in name), None) if bf16 else None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"host": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["host"])
        torch.cuda.set_rng_state(state["device"])

    def side_stream(self) -> Any:
        return torch.cuda.Stream()

    def queue_on(self, stream: Any) -> AbstractContextManager[Any]:
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def wait_stream(self, stream: Any) -> None:
        torch.cuda.current_stream().wait_stream(stream)

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

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
        attended: torch.Tensor = _PackedAttention.apply(query, key, value, cu_seqlens, max_seqlen, scale)
        return attended

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, eps)

    def profile(self, path: Path, shapes: bool, memory: bool, stack: bool) -> AbstractContextManager[Any]:
        return torch_profile(path, shapes, memory, stack)

    def worker_environment(self, ranks: int) -> dict[str, str]:
        # Megatron counts on kernels being scheduled in the order of their launch
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def vllm_environment(self, kv_cache_gib: int, eager: bool) -> dict[str, str]:
        return {}


class _FlashAttention:
    """See `mindspeed_rl.device.base.BlockAttention`: torch's flash attention.

    Its public name `varlen_attn` hides the log-sum-exp and the gradient, and before torch 2.12 wants keys and values
    repeated for each head; here heads may share them.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sequences = _sequences(query, key, cu_seqlens, max_seqlen)
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *sequences, 0.0, cu_seqlens is not None, return_debug_mask=False, scale=scale
        )
        return output, lse.t()

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sequences = _sequences(query, key, cu_seqlens, max_seqlen)
        # no dropout, so no state of a generator either
        random, unused = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)
        saved = (query, key, value, output, lse.t().contiguous(), *sequences)
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            gradient, *saved, 0.0, cu_seqlens is not None, random, unused, scale=scale
        )
        return of_query, of_key, of_value


class _PackedAttention(torch.autograd.Function):
    """Causal attention inside each of the packed sequences."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float | None,
    ) -> torch.Tensor:
        output, lse = _FlashAttention().forward(query, key, value, cu_seqlens, max_seqlen, scale)
        ctx.save_for_backward(query, key, value, output, lse, cu_seqlens)
        ctx.max_seqlen, ctx.scale = max_seqlen, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, lse, cu_seqlens = ctx.saved_tensors
        gradients = _FlashAttention().backward(
            gradient, query, key, value, output, lse, cu_seqlens, ctx.max_seqlen, ctx.scale
        )
        return *gradients, None, None, None


def _sequences(
    query: torch.Tensor, key: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Cumulative and largest lengths of queries and keys; one sequence of all where there is none."""
    if cu_seqlens is not None:
        return cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    ends = torch.arange(2, dtype=torch.int32, device=query.device)  # made there: nothing is copied or waited for
    return ends * len(query), ends * len(key), len(query), len(key)
