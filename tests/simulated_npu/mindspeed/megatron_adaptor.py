"""What MindSpeed and torch_npu's `transfer_to_npu` do when imported, for the simulated NPU.

Megatron-core asks for CUDA by name: `torch.cuda`, `device="cuda"`, `.cuda()`. All of it reaches the NPU from here on,
and nothing is compiled. Of MindSpeed's own features there are none.

Who asks is noted: with the variable `SIMULATED_NPU_REPORT`, which names a file, each place in Megatron-core and in
`mindspeed_rl` from which `torch.cuda` or a device "cuda" is used adds a line `package file:line what`, once in a
process.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch
import torch_npu
from torch_npu import npu

FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "rand", "randn", "randint"),
    *("randperm", "eye", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like"),
)
WATCHED = ("mindspeed_rl", "megatron")
_seen: set[tuple[str, int, str]] = set()


@functools.cache
def _package(file: str) -> str | None:
    """Which of the watched packages a file is of."""
    for name in WATCHED:
        spec = importlib.util.find_spec(name)
        folders = spec.submodule_search_locations if spec else None
        if any(file.startswith(folder + os.sep) for folder in folders or ()):
            return name
    return None


def _note(what: str, caller: FrameType) -> None:
    report, file = os.environ.get("SIMULATED_NPU_REPORT"), caller.f_code.co_filename
    place = (file, caller.f_lineno, what)
    if report is None or place in _seen:
        return
    _seen.add(place)
    if package := _package(file):
        with open(report, "a") as lines:  # a line at a time: processes share the file, and may be killed
            lines.write(f"{package} {file}:{caller.f_lineno} {what}\n")


class _WatchedModule(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            _note(f"torch.cuda.{name}", sys._getframe(1))
        return super().__getattribute__(name)


def _on_npu(device: Any, caller: FrameType) -> Any:
    """`device`, or the NPU where it says CUDA."""
    if not isinstance(device, str | torch.device) or not str(device).startswith("cuda"):
        return device
    _note(f"device {str(device)!r}", caller)
    return torch.device(str(device).replace("cuda", "npu"))


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if "device" in kwargs:
            kwargs["device"] = _on_npu(kwargs["device"], caller)
        return function(*(_on_npu(value, caller) for value in args), **kwargs)

    return call


def _moved_to_npu(move: Callable[..., Any]) -> Callable[..., Any]:
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        _note(".cuda()", sys._getframe(1))
        return move(self, *args, **kwargs)

    return cuda


def _type_as_of_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's distributed optimizer sorts parameters by "torch.cuda.FloatTensor" and so on."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("npu", "cuda") if isinstance(found, str) else found

    return type_


def _not_compiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    return _not_compiled if function is None else function


def _transfer() -> None:
    for name in vars(npu):
        if name.startswith("_lazy") or (not name.startswith("_") and hasattr(torch.cuda, name)):
            setattr(torch.cuda, name, getattr(npu, name))
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = npu.get_rng_state, npu.set_rng_state
    for name in FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(tensor, name, _redirected(getattr(tensor, name)))
    tensor.type = _type_as_of_cuda(tensor.type)
    tensor.cuda, tensor.is_cuda = _moved_to_npu(tensor.npu), tensor.is_npu
    module: Any = torch.nn.Module
    module.to, module.cuda = _redirected(module.to), _moved_to_npu(module.npu)
    compiler: Any = torch
    compiler.compile = _not_compiled
    torch.cuda.__class__ = _WatchedModule


def _is_transferred() -> bool:
    return type(torch.cuda) is _WatchedModule


assert torch_npu.npu is npu
if not _is_transferred():
    _transfer()
