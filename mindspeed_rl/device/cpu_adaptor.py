"""Redirects the CUDA calls inside Megatron-core to the CPU.

Megatron-core asks for CUDA by name: streams, RNG state, `device="cuda"` in tensor factories, `.cuda()`. This is what
torch_npu's `transfer_to_npu` does for the NPU, done for the CPU. It changes torch for the whole process, so only
worker processes that were told to run on the CPU apply it, before they import megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "rand", "randn", "randint"),
    *("empty_strided", "empty_like", "zeros_like", "ones_like", "full_like"),
)


class _Stream:
    """The only stream there is: all CPU work is done when a call returns. Serves as event, too."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def _done(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _done

    def record_event(self, *args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # there is no device to copy to
        return factory(*args, **kwargs)

    return create


def _redirect_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    original_to: Any = torch.Tensor.to
    original_type: Any = torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        cpu_args = ["cpu" if isinstance(arg, str | torch.device) and _is_cuda(arg) else arg for arg in args]
        return original_to(self, *cpu_args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        # the distributed optimizer sorts parameters by "torch.cuda.FloatTensor" and so on
        return original_type(self).replace("torch.", "torch.cuda.")

    torch.Tensor.to = to  # type: ignore[method-assign,assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *a, **k: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]


def _redirect_cuda_module() -> None:
    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    cuda: Any = torch.cuda
    replacements: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": torch.manual_seed,
        "initial_seed": torch.initial_seed,
        "default_generators": [torch.default_generator],
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda stream: nullcontext(),
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "is_current_stream_capturing": lambda: False,
        "FloatTensor": torch.FloatTensor,
        "_lazy_call": lambda call, **kwargs: call(),
    }
    for name, replacement in replacements.items():
        setattr(cuda, name, replacement)
    cuda.random.get_rng_state, cuda.random.set_rng_state = get_rng_state, set_rng_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None


def _accept_tensor_split_sizes() -> None:
    """gloo's all-to-all wants lists where Megatron passes tensors."""
    original = dist.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return original(output, input, output_split_sizes=sizes[0], input_split_sizes=sizes[1], **kwargs)

    dist.all_to_all_single = all_to_all_single  # type: ignore[assignment]


def _pad_uneven_parts() -> None:
    """gloo gathers and scatters parts of one size, but numbers of tokens for experts differ from rank to rank."""
    original_gather = dist.all_gather
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13

    def padded(part: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])

    @functools.wraps(original_gather)
    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in parts}) == 1:
            return original_gather(parts, mine, group=group, async_op=async_op)
        assert not async_op, "parts of different sizes are gathered at once"
        rows = max(len(part) for part in parts)
        gathered = [mine.new_empty(rows, *mine.shape[1:]) for _ in parts]
        original_gather(gathered, padded(mine, rows), group=group)
        for part, source in zip(parts, gathered, strict=True):
            part.copy_(source[: len(part)])
        return None

    @functools.wraps(dist.reduce_scatter)
    def reduce_scatter(
        output: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> None:
        rows = max(len(part) for part in parts)
        result = output.new_empty(rows, *output.shape[1:])
        scatter(result, torch.cat([padded(part, rows) for part in parts]), op=op, group=group)
        output.copy_(result[: len(output)])

    dist.all_gather = all_gather  # type: ignore[assignment]
    dist.reduce_scatter = reduce_scatter  # type: ignore[assignment]


def _not_compiled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return function


def redirect_cuda_to_cpu() -> None:
    """Apply all redirections, once in a process; then import megatron and adapt its RNG tracker."""
    if getattr(torch, "_cuda_is_redirected_to_cpu", False):
        return
    torch._cuda_is_redirected_to_cpu = True  # type: ignore[attr-defined]
    _redirect_tensors()
    _redirect_cuda_module()
    _accept_tensor_split_sizes()
    _pad_uneven_parts()

    # on its import Megatron wraps small functions for the compiler: loading that takes seconds, and it compiles C++
    with mock.patch.object(torch, "compile", _not_compiled):
        from megatron.core import jit
        from megatron.core.tensor_parallel import random as megatron_random
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    jit.jit_fuser = _not_compiled

    # vLLM replaces torch.cuda.Stream once more, by one that records no events
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _Stream()
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    megatron_random._lazy_call = lambda call, **kwargs: call()
