"""Latent attention (MLA, arXiv:2405.04434, section 2.1) on Megatron's local layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mindspeed_rl.device.base import Device


class _ReplicatedLinear(torch.nn.Module):
    """A projection that every tensor-parallel rank holds whole, and applies to the tokens that it has."""

    def __init__(self, config: MLATransformerConfig, size: int, device: torch.device):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(size, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        # Megatron all-reduces the gradients of parameters that carry this mark
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[tokens, 1, hidden] -> [tokens, 1, size], and no bias."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's, with down-projections that are not divided.

    Its local layers divide them over tensor-parallel ranks and gather the results, and the gradient of the rotating
    part of the keys, which all ranks' heads use, is then lost but for a rank's own heads.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, device: Device, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _ReplicatedLinear(config, config.q_lora_rank, device.current())
        size = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = _ReplicatedLinear(config, size, device.current())
