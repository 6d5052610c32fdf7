"""What differs between the versions of Megatron-core that are served: 0.12.1, which MindSpeed patches, and 0.16.1."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from megatron.core import __version__ as installed
from megatron.core import fp8_utils
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

IS_OLD = Version(installed) < Version("0.13")


def chunk_arguments(number: int, chunks: int) -> dict[str, Any]:
    """Of the model class, for one of the chunks that a stage has under virtual pipelining.

    Before 0.13 a chunk looks its number up in the process's state while it is built.
    """
    if chunks == 1:
        return {}
    if IS_OLD:
        mpu.set_virtual_pipeline_model_parallel_rank(number)
        return {}
    return {"vp_stage": number}


def optimizer_arguments(overlap_param_gather: bool) -> dict[str, Any]:
    """Of the optimizer's configuration; older ones read it from that of the data-parallel wrapper."""
    return {} if IS_OLD else {"overlap_param_gather": overlap_param_gather}


def score_scaling(mscale_all_dim: float) -> dict[str, float]:
    """Of the configuration of latent attention: what scales its scores, under either version's name for it."""
    return {"mscale" if IS_OLD else "mscale_all_dim": mscale_all_dim}


def attention_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """What latent attention makes; newer ones ask for what it was made of, too, for a variant that is not used."""
    return (query, key, value) if IS_OLD else (query, key, value, None, None)


def has_parameters(optimizer: Any) -> bool:
    """Whether one of a chain of optimizers steps on any; before 0.13 only the distributed one may have none."""
    return not getattr(optimizer, "is_stub_optimizer", False)


def step_with_all_stages(chained: Any, has_experts: bool) -> None:
    """Have a pipeline stage without experts take part in the norm of all experts' gradients.

    Before 0.13 it has no optimizer for them, and the other stages wait for it, unless all norms are summed at once.
    Zeros among the gradients are counted in the same way, always, and nobody asks for their number.
    """
    if not IS_OLD:
        return
    chained.count_zeros = lambda: 0
    if not has_experts or len(chained.chained_optimizers) > 1:
        return
    (rest,) = chained.chained_optimizers
    group = mpu.get_expert_tensor_model_pipeline_parallel_group()
    if rest.get_grad_stats_parallel_group() not in (None, group):
        chained.get_grad_norm = lambda: math.hypot(rest.get_grad_norm(), get_grad_norm_fp32([], 2.0, group))


def do_without_transformer_engine() -> None:
    """Newer versions look for its names where it is not installed, older ones for its version.

    0.16's router looks for a kernel under a name that exists only with it, and its latent attention takes it to be
    there where Megatron's own wrappers of it can be imported, but without it they are no classes. The distributed
    optimizer of 0.12 hands all 8-bit parameters to it after a step, also if there are none.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False
    if IS_OLD:
        distrib_optimizer.quantize_param_shard = _quantize_if_any


def leave_frozen_embeddings_alone() -> None:
    """Before 0.13 stages add up the gradients of a tied embedding also if it is frozen, and has none."""
    # the package has a function of the same name in place of the module
    module: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    add_up = module._allreduce_word_embedding_grads
    if not IS_OLD or add_up.__name__ == "add_up_trained":
        return

    def add_up_trained(model: list[Any], *arguments: Any) -> None:
        named = [item for chunk in model for item in chunk.named_parameters()]
        if any(p.requires_grad for name, p in named if "word_embeddings" in name or "output_layer" in name):
            add_up(model, *arguments)

    module._allreduce_word_embedding_grads = add_up_trained


def _quantize_if_any(parameters: list[Any], *arguments: Any, **named: Any) -> None:
    if parameters:
        fp8_utils.quantize_param_shard(parameters, *arguments, **named)
