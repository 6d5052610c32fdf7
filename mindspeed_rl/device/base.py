"""The one interface through which training and generation touch a device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch


class BlockAttention(Protocol):
    """Attention to some of the keys, so that attention to all of them can be put together from the log-sum-exp."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention inside each of the packed sequences; without any, of all queries to all keys.

        Args:
            query: [Tq, heads, head dimension].
            key: [Tk, heads, head dimension].
            value: as `key`.
            cu_seqlens: [B + 1] int32, where sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]; or None.
            max_seqlen: at least the length of the longest sequence; 0 where there are none.
            scale: what scores are multiplied with; None: head dimension^-1/2.

        Returns:
            Output [Tq, heads, head dimension], and the log-sum-exp of the scores [Tq, heads], float32 or wider.
        """

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
        """What these keys and values contribute to the gradients of query, key and value.

        Args:
            gradient: of the loss by `output`.
            output: of attention to all keys, of which these may be some.
            lse: its log-sum-exp.
        """


class Swiglu(Protocol):
    """SiLU of one half of the channels, times the other half."""

    def __call__(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 f], the half that goes through SiLU first, to [T, f]. There may be no rows."""


class Rotate(Protocol):
    """Rotary position embedding: pairs of channels turn by an angle."""

    def __call__(self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Turn all channels; those of a pair are d / 2 apart.

        Args:
            hidden: [T, heads, d].
            cosines: [T, d], of the dtype of `hidden`, -1 to 1; both channels of a pair have the same.
            sines: as `cosines`.
        """


class Device(Protocol):
    """A kind of device, chosen once in each worker process.

    Nothing here is called when the package is imported: `install` and `select` are what a worker does first.
    """

    name: str  # "npu" | "cuda" | "cpu"
    collectives_backend: str  # torch.distributed backend
    ray_resource: str | None  # Ray resource that counts these devices; None: plain CPUs
    visible_devices_variable: str | None  # environment variable that narrows what a process sees
    rollout_can_sleep: bool  # vLLM can give its memory back between generations
    swiglu: Swiglu | None  # in one kernel, in place of Megatron's own fused one; None: Megatron's own, where one runs
    rotate: Rotate | None  # in one kernel; None: written out, and compiled where torch's compiler is used
    groups_matmuls: bool  # torch multiplies groups of rows with a matrix each (`torch.nn.functional.grouped_mm`) here
    block_attention: BlockAttention | None  # what ring attention is made of; None: not on this device

    def install(self) -> None:
        """Adapt torch to this device. Where megatron is imported, `engine.megatron.bootstrap` does so before."""

    def available(self) -> bool:
        """True if this process can use such a device."""

    def count(self) -> int:
        """Devices visible to this process."""

    def select(self, index: int) -> torch.device:
        """Make device `index` the current one and return it."""

    def current(self) -> torch.device:
        """The current device."""

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def empty_cache(self) -> None:
        """Give cached memory back."""

    def memory_allocated(self) -> int:
        """Bytes in use by tensors (on cpu: resident bytes of this process)."""

    def max_memory_allocated(self) -> int:
        """Largest `memory_allocated` since the last reset, in bytes."""

    def reset_peak_memory(self) -> None:
        """Start a new peak-memory measurement."""

    def free_memory(self) -> int:
        """Bytes on the device that no process has taken (on cpu: of the host)."""

    def total_memory(self) -> int:
        """Bytes on the device (on cpu: of the host)."""

    def peak_flops(self, bf16: bool) -> float | None:
        """Dense matrix FLOP/s by the vendor's data sheet, for utilisation figures; None where not known."""

    def manual_seed(self, seed: int) -> None:
        """Seed the device's default generator, and the host's."""

    def rng_state(self) -> dict[str, torch.Tensor]:
        """State of the host's and the device's default generators."""

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `rng_state` returned."""

    def side_stream(self) -> Any:
        """A new stream, whose work may overlap that of the current one (cpu: None, as there is but one)."""

    def queue_on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work queued inside goes to a side stream, behind all that the current stream has queued so far."""

    def wait_stream(self, stream: Any) -> None:
        """Make the current stream wait for what was queued on a side stream. The host does not wait."""

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 in host memory, page-locked where the device can copy from and to it on its own then."""

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
        """Causal attention inside each of the packed sequences.

        Args:
            query: [T, heads, head dimension].
            key: [T, key/value heads, head dimension]; `heads` is a multiple of it.
            value: as `key`.
            cu_seqlens: [B + 1] int32, where sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1].
            max_seqlen: length of the longest sequence.
            scale: what scores are multiplied with; None: head dimension^-1/2.
            starts: the numbers of `cu_seqlens`, for kernels that take them from the host, which else has to wait for
                the device.

        Returns:
            [T, heads, head dimension].
        """

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), in one kernel where there is one."""

    def profile(self, path: Path, shapes: bool, memory: bool, stack: bool) -> AbstractContextManager[Any]:
        """Record what host and device do inside, and write it when that ends, to `path` with a suffix.

        Args:
            path: without suffix; its folder is there.
            shapes: with the shapes of operators' inputs.
            memory: with memory taken and given back.
            stack: with the lines of source code that called the operators.
        """

    def worker_environment(self, ranks: int) -> dict[str, str]:
        """Environment of a worker process, set before it starts; `ranks` workers may share its host."""

    def vllm_environment(self, kv_cache_gib: int, eager: bool) -> dict[str, str]:
        """Environment that vLLM needs on this device, set before vllm is imported.

        eager: nothing is to be compiled.
        """
