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


def dtypes_of(model: ModelConfig) -> dict[str, torch.dtype]:
    """bfloat16, but norms in float32."""
    return {p.name: torch.float32 if "norm" in p.name else torch.bfloat16 for p in parameter_table(model)}


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
