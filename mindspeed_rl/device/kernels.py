"""What torch computes faster, or more exactly, in another way on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


def fused(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function of tensors, the first of which says where: on CUDA compiled, elsewhere as it is.

    Step by step it would take a pass over memory for every operation. How long the tensors are (dimension 0) may
    change from call to call. With `TORCHDYNAMO_DISABLE=1` nothing is compiled.
    """
    if not _is_cuda(arguments[0]):
        return function(*arguments)
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    return _compiled(function)(*arguments)


@functools.cache
def _compiled(function: Callable[..., _Result]) -> Callable[..., _Result]:
    compiled: Callable[..., _Result] = torch.compile(function)
    return compiled


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a · b to `total`, which may be wider than they are: the product is then not rounded before, on CUDA."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif _is_cuda(total):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _is_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"  # `is_cuda` is true of NPUs, too, once torch_npu has taken torch.cuda's place
