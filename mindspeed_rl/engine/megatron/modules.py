"""Modules put into Megatron's local layer spec: packed attention, norm and rotary embedding, by device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer import mlp as megatron_mlp
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mindspeed_rl.device.base import Device, Rotate, Swiglu
from mindspeed_rl.device.kernels import fused
from mindspeed_rl.engine.megatron.context_parallel import heads_to_tokens, tokens_to_heads
from mindspeed_rl.engine.megatron.packing import PackedSequences
from mindspeed_rl.engine.megatron.ring_attention import ring_attention


@dataclass
class RotaryTransformerConfig(TransformerConfig):
    """Megatron's configuration, and what our modules need to know."""

    attention_scaling: float = 1.0  # what the rotary embedding's cosines and sines are multiplied with
    rotate: Rotate | None = None  # the kernel that the rotary embedding runs in; None: it is written out
    fused_rms_norm: bool = True  # by the device's kernel; False: by torch's operation


@dataclass
class LatentTransformerConfig(MLATransformerConfig):
    """The same for latent attention."""

    attention_scaling: float = 1.0
    rotate: Rotate | None = None
    fused_rms_norm: bool = True


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
            starts = packed_seq_params.starts or None
            attended = self.device.varlen_attention(query, key, value, cu_seqlens, max_seqlen, self.scale, starts)
        attended = attended[..., :size]
        return (heads_to_tokens(attended, group) if shares_heads else attended).flatten(1)


class RMSNorm(torch.nn.Module):
    """RMS norm in the device's kernel, or in torch's operation.

    Under sequence parallelism the weight's gradient is summed over tensor-parallel ranks.
    """

    def __init__(
        self,
        config: RotaryTransformerConfig | LatentTransformerConfig,
        hidden_size: int,
        device: Device,
        eps: float = 1e-6,
        **_: Any,
    ):
        super().__init__()
        self.device, self.eps, self.fused = device, eps, config.fused_rms_norm
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device.current()))
        # Megatron all-reduces the gradients of parameters that carry this mark
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.fused:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return self.device.rms_norm(hidden, self.weight, self.eps)


def rotate_packed(
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
    settings = config.multi_latent_attention, config.attention_scaling
    rank = mpu.get_context_parallel_rank()
    if config.rotate is not None:
        return _rotated_by(config.rotate, hidden, freqs, cu_seqlens, rank, *settings)
    return fused(_rotated, hidden, freqs, cu_seqlens, rank, *settings)


def _rotated(
    hidden: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rank: int,
    neighbours: bool,
    scaling: float,
) -> torch.Tensor:
    """The tokens of a context-parallel rank."""
    rotated: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(
        hidden.unsqueeze(1),
        freqs[_positions(hidden, cu_seqlens, rank)],
        rotary_interleaved=False,
        multi_latent_attention=neighbours,
        mscale=scaling,
    )
    return rotated.squeeze(1)


def _positions(hidden: torch.Tensor, cu_seqlens: torch.Tensor, rank: int) -> torch.Tensor:
    """Of a context-parallel rank's tokens in their sequences."""
    tokens = torch.arange(len(hidden), dtype=cu_seqlens.dtype, device=hidden.device) + rank * len(hidden)
    # of the bounds as they are: of a part of them torch's compiler takes the beginning
    return tokens - cu_seqlens[torch.bucketize(tokens, cu_seqlens, right=True) - 1]


def _rotated_by(
    rotate: Rotate,
    hidden: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rank: int,
    neighbours: bool,
    scaling: float,
) -> torch.Tensor:
    """The same in a kernel. As in Megatron, neighbours that turn together are half the channels apart afterwards."""
    size = freqs.shape[-1]
    turning, rest = hidden[..., :size], hidden[..., size:]
    if neighbours:
        turning = torch.cat((turning[..., 0::2], turning[..., 1::2]), dim=-1)
    angles = freqs[_positions(hidden, cu_seqlens, rank)].reshape(len(hidden), size)
    turned = rotate(turning, angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype))
    if scaling != 1.0:  # afterwards: kernels take cosines and sines, which are not above 1
        turned = turned * scaling
    return torch.cat((turned, rest), dim=-1)


def use_packed_rotary_embedding() -> None:
    """Megatron's own routine for packed input splits, rotates and joins sequence by sequence."""
    megatron_attention.apply_rotary_pos_emb = rotate_packed


def use_activation_kernel(swiglu: Swiglu) -> None:
    """Take a kernel in place of Megatron's fused activation, which is written for CUDA."""

    def activate(hidden: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        assert bias is None, "no model has biases in its MLP"
        *rows, width = hidden.shape
        return swiglu(hidden.reshape(-1, width)).view(*rows, width // 2)

    def activate_weighted(
        hidden: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        return (activate(hidden, bias) * weights).to(hidden.dtype)

    megatron_mlp.bias_swiglu_impl = shared_experts.bias_swiglu_impl = activate
    megatron_mlp.weighted_bias_swiglu_impl = activate_weighted
