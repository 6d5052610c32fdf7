"""Tiny models' weights, and every rank's shards of them, made without any engine."""

import torch
import torch.distributed as dist

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.export import Groups
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import parameter_table


def tiny_model(**overrides) -> ModelConfig:
    values = {
        "architecture": "Qwen2ForCausalLM",
        "num_layers": 3,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 6,
        "vocab_size": 45,
        "max_position_embeddings": 64,
        "add_qkv_bias": True,
        "qk_layernorm": True,
    }
    return ModelConfig(**{**values, **overrides})


def experts_model(**overrides) -> ModelConfig:
    """Eight experts in every layer but the second."""
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_layer_freq": (1, 0, 1)}
    return tiny_model(**{"architecture": "Qwen3MoeForCausalLM", **experts, **overrides})


def latent_model(**overrides) -> ModelConfig:
    """Latent attention, and experts with a bias and a shared one in every layer but the first."""
    attention = {
        "num_query_groups": 4,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 5,
        "kv_lora_rank": 8,
        "q_lora_rank": 7,
    }
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_layer_freq": (0, 1, 1)}
    further = {"moe_router_score_function": "sigmoid", "moe_shared_expert_intermediate_size": 12}
    settings = {**attention, **experts, **further, "moe_router_enable_expert_bias": True, **overrides}
    return tiny_model(architecture="DeepseekV3ForCausalLM", add_qkv_bias=False, qk_layernorm=False, **settings)


def dtypes_of(model: ModelConfig) -> dict[str, torch.dtype]:
    """bfloat16, but norms and biases in float32."""
    full = {p.name for p in parameter_table(model) if "norm" in p.name or "bias" in p.name}
    return {p.name: torch.float32 if p.name in full else torch.bfloat16 for p in parameter_table(model)}


def full_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Hugging Face tensors."""
    generator = torch.Generator().manual_seed(5)
    dtypes, weights = dtypes_of(model), {}
    for parameter in parameter_table(model):
        for name, shape in zip(parameter.hf_names, parameter.hf_shapes, strict=True):
            weights[name] = torch.randn(shape, generator=generator).to(dtypes[parameter.name])
    return weights


def shards_of(weights, model: ModelConfig, layout: WeightLayout, rank: int) -> dict[str, torch.nn.Parameter]:
    """What a rank holds, by Megatron name."""
    tp_rank, pp_rank, replica = layout.coordinates(rank)
    return {
        name: torch.nn.Parameter(
            parameter.shard(
                parameter.from_hf([weights[hf_name] for hf_name in parameter.hf_names]),
                tp_rank,
                layout.tp,
            )
        )
        for name, parameter in layout.held(model, pp_rank, layout.expert_rank(replica)).items()
    }


def make_groups(layout: WeightLayout, rank: int) -> Groups:
    """The process groups of a rank (a collective of all)."""

    def group(key) -> dist.ProcessGroup | None:
        """The group of all ranks that agree with this one in `key`, or None where it is alone."""
        members: dict[tuple[int, ...], list[int]] = {}
        for other in range(layout.world):
            members.setdefault(key(*layout.coordinates(other)), []).append(other)
        groups = {key: dist.new_group(ranks) for key, ranks in members.items() if len(ranks) > 1}
        return groups.get(key(*layout.coordinates(rank)))

    return Groups(
        pipeline=group(lambda tp, pp, replica: (tp, replica)),
        tensor=group(lambda tp, pp, replica: (pp, replica)),
        expert=group(lambda tp, pp, replica: (pp, replica // layout.ep)),
        replica=group(lambda tp, pp, replica: (replica // layout.ep,)),
    )
