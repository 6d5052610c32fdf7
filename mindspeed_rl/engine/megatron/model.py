"""Builds Megatron-core models from our configuration."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.megatron.experts import GroupedExperts
from mindspeed_rl.engine.megatron.modules import (
    PackedAttention,
    RMSNorm,
    use_packed_rotary_embedding,
    use_router_without_transformer_engine,
)
from mindspeed_rl.resharding.layout import WeightLayout


def transformer_config(cfg: MegatronConfig, model: ModelConfig, device: Device) -> TransformerConfig:
    """Megatron's configuration of `model` under the parallel layout and precision of `cfg`."""
    dtype = torch.bfloat16 if cfg.bf16 else torch.float32
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        add_qkv_bias=model.add_qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=cfg.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=cfg.tensor_model_parallel_size,
        pipeline_model_parallel_size=cfg.pipeline_model_parallel_size,
        sequence_parallel=cfg.sequence_parallel,
        # micro-batches are packed: their token counts differ, so stages tell each other the shapes
        variable_seq_lengths=cfg.pipeline_model_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",  # the one that allows variable lengths; checked for dense models, too
        **_expert_settings(cfg, model),
        recompute_granularity=cfg.recompute_granularity,
        recompute_method=cfg.recompute_method,
        recompute_num_layers=cfg.recompute_num_layers,
        # the loss arrives with global denominators: gradients are summed, never averaged, over DP and micro-batches
        calculate_per_token_loss=True,
        perform_initialization=False,  # every weight comes from a checkpoint
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=device.fuses_activations,
    )


def _expert_settings(cfg: MegatronConfig, model: ModelConfig) -> dict[str, Any]:
    """Settings of a mixture of experts; every token reaches all its experts, and nothing is added to the loss."""
    if model.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_moe_experts,
        "expert_model_parallel_size": cfg.expert_model_parallel_size,
        "moe_layer_freq": [int(model.is_moe_layer(layer)) for layer in range(model.num_layers)],
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


def _layer_spec(model: ModelConfig, device: Device, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=model.num_moe_experts if has_experts else None,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=model.qk_layernorm,
    )
    norm = ModuleSpec(module=RMSNorm, params={"device": device})
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"device": device})
    if model.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if has_experts and device.groups_matmuls:
        layer.submodules.mlp.submodules.experts.module = GroupedExperts
    return layer


def build_model(cfg: MegatronConfig, model: ModelConfig, device: Device, layout: WeightLayout) -> GPTModel:
    """This rank's part of the model; its weights are not initialised."""
    config = transformer_config(cfg, model, device)
    use_packed_rotary_embedding()
    use_router_without_transformer_engine()
    pp_rank, ep_rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    layers = [_layer_spec(model, device, model.is_moe_layer(layer)) for layer in layout.stages[pp_rank]]
    norm = ModuleSpec(module=RMSNorm, params={"device": device})
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
    built = GPTModel(
        config,
        block,
        vocab_size=model.padded_vocab_size(cfg.tensor_model_parallel_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
    )
    # Megatron marks shards while initialising weights, which we skip; its gradient norm counts unmarked ones once
    for name, parameter in layout.held(model, pp_rank, ep_rank).items():
        tensor = built.get_parameter(name)
        tensor.tensor_model_parallel = parameter.tp_dim is not None
        if parameter.tp_dim is not None:
            tensor.partition_dim, tensor.partition_stride = parameter.tp_dim, 1
    return built.to(device.current())
