"""CPUs: the same code at small scale, with real Megatron-core over gloo and vLLM's CPU build."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_rl.device.base import BlockAttention, Rotate, Swiglu
from mindspeed_rl.device.profiler import torch_profile


class CpuDevice:
    """See `mindspeed_rl.device.base.Device`."""

    name = "cpu"
    collectives_backend = "gloo"
    ray_resource: str | None = None
    visible_devices_variable: str | None = None
    rollout_can_sleep = False
    swiglu: Swiglu | None = None
    rotate: Rotate | None = None
    groups_matmuls = True
    block_attention: BlockAttention | None

    def __init__(self) -> None:
        self.block_attention = _BlockAttention()

    def install(self) -> None:
        from mindspeed_rl.device.cpu_adaptor import redirect_cuda_to_cpu

        redirect_cuda_to_cpu()

    def available(self) -> bool:
        return True

    def count(self) -> int:
        return os.cpu_count() or 1

    def select(self, index: int) -> torch.device:
        return self.current()

    def current(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        """CPU work is done when the call returns."""

    def empty_cache(self) -> None:
        """There is no cache to give back."""

    def memory_allocated(self) -> int:
        return _status_bytes("VmRSS")

    def max_memory_allocated(self) -> int:
        return _status_bytes("VmHWM")

    def reset_peak_memory(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # 5: reset the peak resident set (man 5 proc)

    def free_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def total_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_flops(self, bf16: bool) -> float | None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"host": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["host"])

    def side_stream(self) -> Any:
        return None

    def queue_on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait_stream(self, stream: Any) -> None:
        """There is one stream."""

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

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
        """Pads to [B, heads, L, dimension] for one SDPA call: a causal mask hides padding on the right by itself."""
        padding = _Padding(cu_seqlens, max_seqlen, len(query))
        query, key, value = (padding.pad(packed) for packed in (query, key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return padding.remove(output)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, eps)

    def profile(self, path: Path, shapes: bool, memory: bool, stack: bool) -> AbstractContextManager[Any]:
        return torch_profile(path, shapes, memory, stack)

    def worker_environment(self, ranks: int) -> dict[str, str]:
        # ranks of one host must not fight over its cores; whoever starts the run may know better
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
        return {"OMP_NUM_THREADS": threads}

    def vllm_environment(self, kv_cache_gib: int, eager: bool) -> dict[str, str]:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            # binding threads to cores would put all ranks of a machine on the same ones
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # latent attention as plain attention: kernels of its own take bfloat16 or one size of head only
            "VLLM_MLA_DISABLE": "1",
        }
        if eager:  # helpers of vLLM's sampler are compiled even so, which takes seconds at the first token
            environment["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCHDYNAMO_DISABLE", "1")
        return environment


class _Padding:
    """[tokens, heads, …] of packed sequences to [B, heads, L, …] and back; without any, of one sequence."""

    def __init__(self, cu_seqlens: torch.Tensor | None, max_seqlen: int, total: int):
        self._index: tuple[torch.Tensor, torch.Tensor] | None = None
        if cu_seqlens is not None:
            lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
            row = torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=total)
            starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths, output_size=total)
            self._index, self._shape = (row, torch.arange(total) - starts), (len(lengths), max_seqlen)

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        if self._index is None:
            return packed[None].transpose(1, 2)
        return packed.new_zeros(*self._shape, *packed.shape[1:]).index_put(self._index, packed).transpose(1, 2)

    def remove(self, padded: torch.Tensor) -> torch.Tensor:
        by_token = padded.transpose(1, 2)
        return by_token[0] if self._index is None else by_token[self._index]


class _BlockAttention:
    """See `mindspeed_rl.device.base.BlockAttention`: torch's kernels behind `scaled_dot_product_attention`."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        padding = _Padding(cu_seqlens, max_seqlen, len(query))
        padded = [padding.pad(packed) for packed in (query, key, value)]
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *padded, is_causal=cu_seqlens is not None, scale=scale
        )
        output, lse = (padding.remove(result) for result in results)
        return output, lse

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
        padding = _Padding(cu_seqlens, max_seqlen, len(query))
        padded = [padding.pad(packed) for packed in (gradient, query, key, value, output, lse)]
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *padded, 0.0, cu_seqlens is not None, scale=scale
        )
        of_query, of_key, of_value = (padding.remove(result) for result in results)
        return of_query, of_key, of_value


def _status_bytes(field: str) -> int:
    """A memory field of this process's status, in bytes (the kernel reports KiB)."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")
