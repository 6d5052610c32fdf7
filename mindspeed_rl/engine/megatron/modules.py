"""Modules put into Megatron's local layer spec: packed attention, norm and rotary embedding, by device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer import multi_latent_attention as megatron_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mindspeed_rl.device.base import Device
from mindspeed_rl.device.kernels import fused
from mindspeed_rl.engine.megatron.context_parallel import heads_to_tokens, tokens_to_heads
from mindspeed_rl.engine.megatron.packing import PackedSequences
from mindspeed_rl.engine.megatron.ring_attention import ring_attention


@dataclass
class RotaryTransformerConfig(TransformerConfig):
    """Megatron's configuration, and what the rotary embedding's cosines and sines are multiplied with."""

    attention_scaling: float = 1.0


@dataclass
class LatentTransformerConfig(MLATransformerConfig):
    """The same for latent attention."""

    attention_scaling: float = 1.0


class PackedAttention(torch.nn.Module):
    """Core attention over sequences packed end to end: each token sees its own sequence up to itself.

    Values may be shorter than keys: attention kernels want both alike, so zeros are appended for them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        device: Device,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **_: Any,
    ):
        super().__init__()
        self.device, self.scale = device, softmax_scale
        self.ring = cp_comm_type == "p2p"  # context-parallel ranks pass keys and values on, instead of sharing heads

    def forward(
        self,
        query: torch.Tensor,  # [T/cp, heads, head dimension], this tensor-parallel rank's heads
        key: torch.Tensor,  # [T/cp, key/value heads, head dimension]
        value: torch.Tensor,  # [T/cp, key/value heads, value dimension]
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[T/cp, heads * value dimension]."""
        assert packed_seq_params is not None, "training input is always packed"
        cu_seqlens, max_seqlen = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        group = mpu.get_context_parallel_group()
        shares_heads = not self.ring and group.size() > 1
        if shares_heads:
            query, key, value = (tokens_to_heads(hidden, group) for hidden in (query, key, value))
        size = value.shape[-1]
        if size < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - size))
        if self.ring:
            kernels = self.device.block_attention
            assert kernels is not None, "refused when the device was chosen"
            attended = ring_attention(query, key, value, packed_seq_params, group, kernels, self.scale)
        else:
            attended = self.device.varlen_attention(query, key, value, cu_seqlens, max_seqlen, self.scale)
        attended = attended[..., :size]
        return (heads_to_tokens(attended, group) if shares_heads else attended).flatten(1)


class RMSNorm(torch.nn.Module):
    """The device's RMS norm; its gradient is summed over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, device: Device, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.device, self.eps = device, eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device.current()))
        # Megatron all-reduces the gradients of parameters that carry this mark
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.device.rms_norm(hidden, self.weight, self.eps)


def _rotate_packed(
    hidden: torch.Tensor,
    freqs: torch.Tensor,
    config: RotaryTransformerConfig | LatentTransformerConfig,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Rotary embedding of packed tokens [T/cp, heads, dimension] without a loop over the sequences.

    With latent attention the channels that rotate together are neighbours, in DeepSeek's checkpoints as here.
    """
    assert cu_seqlens is not None, "training input is always packed"
    settings = config.rotary_interleaved, config.multi_latent_attention, config.attention_scaling
    return fused(_rotated, hidden, freqs, cu_seqlens, mpu.get_context_parallel_rank(), *settings)


def _rotated(
    hidden: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rank: int,
    interleaved: bool,
    neighbours: bool,
    scaling: float,
) -> torch.Tensor:
    """The tokens of a context-parallel rank."""
    tokens = torch.arange(len(hidden), dtype=cu_seqlens.dtype, device=hidden.device) + rank * len(hidden)
    # of the bounds as they are: of a part of them torch's compiler takes the beginning
    positions = tokens - cu_seqlens[torch.bucketize(tokens, cu_seqlens, right=True) - 1]
    rotated: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(
        hidden.unsqueeze(1),
        freqs[positions],
        rotary_interleaved=interleaved,
        multi_latent_attention=neighbours,
        mscale=scaling,
    )
    return rotated.squeeze(1)


def use_packed_rotary_embedding() -> None:
    """Megatron's own routine for packed input splits, rotates and joins sequence by sequence."""
    megatron_attention.apply_rotary_pos_emb = _rotate_packed
    megatron_latent_attention.apply_rotary_pos_emb = _rotate_packed


def do_without_transformer_engine() -> None:
    """Megatron's router looks for a kernel under a name that exists only where Transformer Engine is installed.

    Its latent attention takes Transformer Engine to be there where Megatron's own wrappers of it can be imported, but
    without it they are no classes.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(getattr(megatron_latent_attention, "TELinear", None), type):
        megatron_latent_attention.HAVE_TE = False
