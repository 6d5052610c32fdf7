"""Pointwise and row-wise functions as one kernel each, with torch's compiler, where that is worth its seconds."""

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
    if not arguments[0].is_cuda:
        return function(*arguments)
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    return _compiled(function)(*arguments)


@functools.cache
def _compiled(function: Callable[..., _Result]) -> Callable[..., _Result]:
    compiled: Callable[..., _Result] = torch.compile(function)
    return compiled
