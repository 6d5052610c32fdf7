"""Latent attention (MLA, arXiv:2405.04434, section 2.1) on Megatron's local layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.megatron.modules import rotate_packed
from mindspeed_rl.engine.megatron.packing import PackedSequences
from mindspeed_rl.engine.megatron.versions import attention_inputs


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
    """Megatron's, with down-projections that are not divided, over packed sequences.

    Its local layers divide them over tensor-parallel ranks and gather the results, and the gradient of the rotating
    part of the keys, which all ranks' heads use, is then lost but for a rank's own heads. Before 0.13 it takes packed
    sequences for a batch.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, device: Device, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _ReplicatedLinear(config, config.q_lora_rank, device.current())
        size = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = _ReplicatedLinear(config, size, device.current())

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,  # [T/cp, 1, hidden], or with sequence parallelism this rank's part of the tokens
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Query and key [T/cp, heads, head dimension], value [T/cp, heads, value dimension], of this rank's heads."""
        assert packed_seq_params is not None, "training input is always packed"
        config, heads = self.config, self.num_attention_heads_per_partition
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))
        query = query.view(-1, heads, self.q_head_dim)
        combined, _ = self.linear_kv_down_proj(hidden_states)
        compressed, key_turning = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        if config.sequence_parallel:
            key_turning = gather_from_sequence_parallel_region(key_turning)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        key, value = both.view(len(query), heads, -1).split([config.qk_head_dim, config.v_head_dim], dim=-1)

        # as many as the longest sequence has, of all context-parallel ranks
        frequencies = self.rotary_pos_emb(packed_seq_params.max_seqlen_q, packed_seq=True)
        query, query_turning = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        query_turning, key_turning = (
            rotate_packed(turning, frequencies, config, packed_seq_params.cu_seqlens_q)
            for turning in (query_turning, key_turning)
        )
        query = torch.cat([query, query_turning], dim=-1)
        key = torch.cat([key, key_turning.expand(-1, heads, -1)], dim=-1)
        return attention_inputs(query, key, value)
