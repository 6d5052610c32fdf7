"""Builds Megatron-core models from our configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_rl.config.kernels import uses_kernel
from mindspeed_rl.config.layout import Chunks
from mindspeed_rl.config.model import AdaptedModel, ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.megatron.experts import GroupedExperts
from mindspeed_rl.engine.megatron.language_model import LanguageModel
from mindspeed_rl.engine.megatron.latent_attention import LatentAttention
from mindspeed_rl.engine.megatron.lora import add_adapters
from mindspeed_rl.engine.megatron.modules import (
    LatentTransformerConfig,
    PackedAttention,
    RMSNorm,
    RotaryTransformerConfig,
    use_activation_kernel,
    use_packed_rotary_embedding,
)
from mindspeed_rl.engine.megatron.rotary import attention_scaling, inverse_frequencies
from mindspeed_rl.engine.megatron.router import use_grouped_routers
from mindspeed_rl.engine.megatron.versions import chunk_arguments, do_without_transformer_engine, score_scaling
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import global_name


def transformer_config(cfg: MegatronConfig, model: ModelConfig, device: Device, stages: Chunks) -> TransformerConfig:
    """Megatron's configuration of `model` under the parallel layout and precision of `cfg`.

    Megatron divides its number of layers evenly, so it is told of as many as if every chunk were as large as the
    largest; how many a chunk really has, `build_model` says.
    """
    pp, chunks = len(stages), len(stages[0])
    dtype = torch.bfloat16 if cfg.bf16 else torch.float32
    kind = LatentTransformerConfig if model.has_latent_attention else RotaryTransformerConfig
    return kind(
        num_layers=pp * chunks * max(len(layers) for stage in stages for layers in stage),
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        attention_scaling=attention_scaling(model.rope_scaling),
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
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # one direction at a time: between two stages a batch of both would be matched wrongly
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        context_parallel_size=cfg.context_parallel_size,
        cp_comm_type="p2p" if cfg.uses_ring_attention else "a2a",
        sequence_parallel=cfg.sequence_parallel,
        # micro-batches are packed: their token counts differ, so stages tell each other the shapes
        variable_seq_lengths=pp > 1,
        moe_token_dispatcher_type="alltoall",  # the one that allows variable lengths; checked for dense models, too
        **_latent_attention_settings(model),
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
        bias_activation_fusion=uses_kernel(cfg, "use_fused_swiglu", device.name),
        rotate=device.rotate if uses_kernel(cfg, "use_fused_rotary_pos_emb", device.name) else None,
        fused_rms_norm=uses_kernel(cfg, "use_fused_rmsnorm", device.name),
    )


def _latent_attention_settings(model: ModelConfig) -> dict[str, Any]:
    if not model.has_latent_attention:
        return {}
    scaling = model.rope_scaling
    return {
        "kv_lora_rank": model.kv_lora_rank,
        "q_lora_rank": model.q_lora_rank,
        "qk_head_dim": model.kv_channels - model.rotary_channels,
        "qk_pos_emb_head_dim": model.rotary_channels,
        "v_head_dim": model.value_channels,
        # frequencies are set by `build_model`; what follows multiplies scores by what `attention_scaling` lacks
        "rope_type": "rope",
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        **score_scaling((scaling and scaling.mscale_all_dim) or 0.0),
    }


def _expert_settings(cfg: MegatronConfig, model: ModelConfig) -> dict[str, Any]:
    """Settings of a mixture of experts; every token reaches all its experts, and nothing is added to the loss.

    Which layers have experts, each chunk's layer specs say: Megatron's own pattern knows no uneven stages.
    """
    if model.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_moe_experts,
        "expert_model_parallel_size": cfg.expert_model_parallel_size,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
    }


def _layer_spec(model: ModelConfig, device: Device, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=model.num_moe_experts if has_experts else None,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=model.qk_layernorm,
        multi_latent_attention=model.has_latent_attention,
    )
    norm = ModuleSpec(module=RMSNorm, params={"device": device})
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"device": device})
    if model.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if model.has_latent_attention:
        layer.submodules.self_attention.module = LatentAttention
        layer.submodules.self_attention.params["device"] = device
        attention.q_layernorm = attention.kv_layernorm = norm
    if has_experts and device.groups_matmuls:
        layer.submodules.mlp.submodules.experts.module = GroupedExperts
    return layer


def build_model(cfg: MegatronConfig, model: ModelConfig, device: Device, layout: WeightLayout) -> list[LanguageModel]:
    """This rank's chunks of the model; their weights are not initialised."""
    config = transformer_config(cfg, model, device, layout.stages)
    use_packed_rotary_embedding()
    if device.swiglu is not None:
        use_activation_kernel(device.swiglu)
    do_without_transformer_engine()
    chunks = layout.stages[mpu.get_pipeline_model_parallel_rank()]
    built = [_build_chunk(config, cfg, model, device, layout, number) for number in range(len(chunks))]
    _mark_shards(built, model, layout)
    return built


def _build_chunk(
    config: TransformerConfig,
    cfg: MegatronConfig,
    model: ModelConfig,
    device: Device,
    layout: WeightLayout,
    number: int,
) -> LanguageModel:
    pp_rank = mpu.get_pipeline_model_parallel_rank()
    layers = [_layer_spec(model, device, model.is_moe_layer(layer)) for layer in layout.stages[pp_rank][number]]
    norm = ModuleSpec(module=RMSNorm, params={"device": device})
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
    built = LanguageModel(
        config,
        block,
        vocab_size=model.padded_vocab_size(cfg.tensor_model_parallel_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=pp_rank == 0 and number == 0,
        post_process=pp_rank == layout.pp - 1 and number == len(layout.stages[pp_rank]) - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        **chunk_arguments(number, len(layout.stages[pp_rank])),
    )
    if model.has_latent_attention:
        use_grouped_routers(built, model.moe_router_enable_expert_bias)
    if built.post_process:
        built.prepare_heads(model.has_output_layer, model.has_value_head)
    frequencies = inverse_frequencies(model, device.current())
    for module in built.modules():  # one of the whole model, or one of each latent attention
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = frequencies
    if isinstance(model, AdaptedModel):
        add_adapters(built, model, cfg.lora_scale)
    return built.to(device.current())


def _mark_shards(chunks: Sequence[LanguageModel], model: ModelConfig, layout: WeightLayout) -> None:
    """Megatron does it while initialising weights, which we skip; its gradient norm counts unmarked ones once."""
    pp_rank, ep_rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    held = layout.held(model, pp_rank, ep_rank)
    tensor: Any  # a parameter that gets attributes
    for name, tensor in named_parameters(chunks, model, layout):
        tp_dim = held[name].tp_dim
        tensor.tensor_model_parallel = tp_dim is not None
        if tp_dim is not None:
            tensor.partition_dim, tensor.partition_stride = tp_dim, 1


def named_parameters(
    chunks: Sequence[torch.nn.Module], model: ModelConfig, layout: WeightLayout
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this rank's chunks by their names in the whole model."""
    stage = layout.stages[mpu.get_pipeline_model_parallel_rank()]
    first_expert = layout.experts(model, mpu.get_expert_model_parallel_rank()).start
    for module, layers in zip(chunks, stage, strict=True):
        for name, parameter in module.named_parameters():
            yield global_name(name, layers.start, first_expert), parameter


def data_parallel(cfg: MegatronConfig, chunks: Sequence[LanguageModel]) -> list[DistributedDataParallel]:
    """The chunks with buffers for gradients that are summed over data-parallel ranks, overlapped if asked for."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=cfg.use_distributed_optimizer,
        overlap_grad_reduce=cfg.overlap_grad_reduce,
        overlap_param_gather=cfg.overlap_param_gather,
        check_for_nan_in_grad=True,
    )
    wrapped = [
        # of several chunks only the first one's gradients are still awaited when the last micro-batch is done
        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    config = chunks[0].config
    if cfg.overlap_grad_reduce:  # Megatron's schedules take one function for one chunk, a list for several
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in wrapped])
        if len(chunks) > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    if cfg.overlap_param_gather and len(chunks) > 1:
        config.param_sync_func = [chunk.start_param_sync for chunk in wrapped]
    return wrapped


def _one_or_all(items: list[Any]) -> Any:
    return items if len(items) > 1 else items[0]
