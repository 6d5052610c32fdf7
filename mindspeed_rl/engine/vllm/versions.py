"""What differs between the versions of vLLM that are served: 0.11 and 0.23 (with vLLM-Ascend), 0.25 and 0.32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """vLLM's own context in which models are built; since 0.12 it is among its utilities."""
    try:
        from vllm.utils.torch_utils import set_default_torch_dtype
    except ImportError:
        from vllm.model_executor.model_loader.utils import (  # type: ignore[attr-defined,no-redef]
            set_default_torch_dtype,
        )
    context: AbstractContextManager[None] = set_default_torch_dtype(dtype)
    return context


def sampling_arguments(kind: type) -> dict[str, Any]:
    """Of its sampling parameters: log-probs flat, since 0.12, instead of an object for each token."""
    return {"flat_logprobs": True} if "flat_logprobs" in kind.__struct_fields__ else {}  # type: ignore[attr-defined]


def name_of_request(returned: str | None, given: str) -> str:
    """By which the engine knows a request: before 0.12 it returns nothing, and takes the name that it is given."""
    return returned or given
