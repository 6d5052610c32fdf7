"""Every parameter of each model family: its Megatron-core name, its Hugging Face tensors, its shape and its cut.

A model family is a *table* of `Row`s (`TABLES`); everything else follows from it (see `names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed_rl.config.lora import LORA_A, LORA_B
from mindspeed_rl.config.model import AdaptedModel, ModelConfig

Transform = Literal["plain", "qkv", "gate_up", "vocab"]


@dataclass(frozen=True)
class Row:
    """One kind of parameter. `{layer}` and `{expert}` in the names stand for the indices of layer and expert."""

    megatron: str
    hf: Mapping[str, tuple[str, ...]]  # Hugging Face name -> its shape in the sizes of `sizes_of`
    tp_dim: int | None  # dimension cut by tensor parallelism; None: every rank holds the whole
    transform: Transform = "plain"
    condition: str | None = None  # field of ModelConfig that must be true for the parameter to exist
    layers: Literal["dense", "moe"] | None = None  # only in layers without or with experts; None: in every layer
    is_float32: bool = False  # whatever the precision of training


OUTPUT_LAYER = "output_layer.weight"
ADAPTER_A, ADAPTER_B = "adapter.a", "adapter.b"  # parameters of a module that has a low-rank adapter
_MCORE, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

DENSE_TABLE = (
    Row("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocab", "hidden")}, 0, "vocab"),
    Row(_MCORE + "input_layernorm.weight", {_HF + "input_layernorm.weight": ("hidden",)}, None),
    Row(
        _MCORE + "self_attention.linear_qkv.weight",
        {
            _HF + "self_attn.q_proj.weight": ("query", "hidden"),
            _HF + "self_attn.k_proj.weight": ("key", "hidden"),
            _HF + "self_attn.v_proj.weight": ("key", "hidden"),
        },
        0,
        "qkv",
    ),
    Row(
        _MCORE + "self_attention.linear_qkv.bias",
        {
            _HF + "self_attn.q_proj.bias": ("query",),
            _HF + "self_attn.k_proj.bias": ("key",),
            _HF + "self_attn.v_proj.bias": ("key",),
        },
        0,
        "qkv",
        condition="add_qkv_bias",
    ),
    Row(
        _MCORE + "self_attention.q_layernorm.weight",
        {_HF + "self_attn.q_norm.weight": ("head",)},
        None,
        condition="qk_layernorm",
    ),
    Row(
        _MCORE + "self_attention.k_layernorm.weight",
        {_HF + "self_attn.k_norm.weight": ("head",)},
        None,
        condition="qk_layernorm",
    ),
    Row(_MCORE + "self_attention.linear_proj.weight", {_HF + "self_attn.o_proj.weight": ("hidden", "query")}, 1),
    Row(_MCORE + "pre_mlp_layernorm.weight", {_HF + "post_attention_layernorm.weight": ("hidden",)}, None),
    Row(
        _MCORE + "mlp.linear_fc1.weight",
        {_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
        0,
        "gate_up",
        layers="dense",
    ),
    Row(_MCORE + "mlp.linear_fc2.weight", {_HF + "mlp.down_proj.weight": ("hidden", "ffn")}, 1, layers="dense"),
    Row("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, None),
    Row(
        OUTPUT_LAYER,
        {"lm_head.weight": ("vocab", "hidden")},
        0,
        "vocab",
        condition="untie_embeddings_and_output_weights",
    ),
)
_EXPERT, _HF_EXPERT = _MCORE + "mlp.experts.local_experts.{expert}.", _HF + "mlp.experts.{expert}."

EXPERT_ROWS = (
    Row(_MCORE + "mlp.router.weight", {_HF + "mlp.gate.weight": ("experts", "hidden")}, None, layers="moe"),
    Row(
        _EXPERT + "linear_fc1.weight",
        {
            _HF_EXPERT + "gate_proj.weight": ("expert_ffn", "hidden"),
            _HF_EXPERT + "up_proj.weight": ("expert_ffn", "hidden"),
        },
        0,
        "gate_up",
        layers="moe",
    ),
    Row(_EXPERT + "linear_fc2.weight", {_HF_EXPERT + "down_proj.weight": ("hidden", "expert_ffn")}, 1, layers="moe"),
)
LATENT_ATTENTION_ROWS = (
    Row(
        _MCORE + "self_attention.linear_q_proj.weight",
        {_HF + "self_attn.q_proj.weight": ("query", "hidden")},
        0,
        condition="has_query_projection",
    ),
    Row(
        _MCORE + "self_attention.linear_q_down_proj.weight",
        {_HF + "self_attn.q_a_proj.weight": ("q_latent", "hidden")},
        None,
        condition="q_lora_rank",
    ),
    Row(
        _MCORE + "self_attention.q_layernorm.weight",
        {_HF + "self_attn.q_a_layernorm.weight": ("q_latent",)},
        None,
        condition="q_lora_rank",
    ),
    Row(
        _MCORE + "self_attention.linear_q_up_proj.weight",
        {_HF + "self_attn.q_b_proj.weight": ("query", "q_latent")},
        0,
        condition="q_lora_rank",
    ),
    Row(
        _MCORE + "self_attention.linear_kv_down_proj.weight",
        {_HF + "self_attn.kv_a_proj_with_mqa.weight": ("kv_latent_and_rotary", "hidden")},
        None,
    ),
    Row(
        _MCORE + "self_attention.kv_layernorm.weight",
        {_HF + "self_attn.kv_a_layernorm.weight": ("kv_latent",)},
        None,
    ),
    Row(
        _MCORE + "self_attention.linear_kv_up_proj.weight",
        {_HF + "self_attn.kv_b_proj.weight": ("unrotated_key_and_value", "kv_latent")},
        0,
    ),
    Row(_MCORE + "self_attention.linear_proj.weight", {_HF + "self_attn.o_proj.weight": ("hidden", "value")}, 1),
)

SHARED_EXPERT_ROWS = (
    Row(
        _MCORE + "mlp.router.expert_bias",
        {_HF + "mlp.gate.e_score_correction_bias": ("experts",)},
        None,
        condition="moe_router_enable_expert_bias",
        layers="moe",
        is_float32=True,
    ),
    Row(
        _MCORE + "mlp.shared_experts.linear_fc1.weight",
        {
            _HF + "mlp.shared_experts.gate_proj.weight": ("shared_ffn", "hidden"),
            _HF + "mlp.shared_experts.up_proj.weight": ("shared_ffn", "hidden"),
        },
        0,
        "gate_up",
        condition="moe_shared_expert_intermediate_size",
        layers="moe",
    ),
    Row(
        _MCORE + "mlp.shared_experts.linear_fc2.weight",
        {_HF + "mlp.shared_experts.down_proj.weight": ("hidden", "shared_ffn")},
        1,
        condition="moe_shared_expert_intermediate_size",
        layers="moe",
    ),
)
# With tied embeddings the last of several pipeline stages keeps its own copy of the embedding.
TIED_OUTPUT = Row(OUTPUT_LAYER, {"model.embed_tokens.weight": ("vocab", "hidden")}, 0, "vocab")

# A critic has a value for each token, as Hugging Face's sequence classification with one label.
VALUE_HEAD_NAME = "score.weight"
VALUE_HEAD = Row("value_head.weight", {VALUE_HEAD_NAME: ("value_head", "hidden")}, None)

DEEPSEEK_TABLE = (
    *(row for row in DENSE_TABLE if ".self_attention." not in row.megatron),
    *LATENT_ATTENTION_ROWS,
    *EXPERT_ROWS,
    *SHARED_EXPERT_ROWS,
)

TABLES: dict[str, tuple[Row, ...]] = {
    "Qwen2ForCausalLM": DENSE_TABLE,
    "Qwen3ForCausalLM": DENSE_TABLE,
    "Qwen3MoeForCausalLM": DENSE_TABLE + EXPERT_ROWS,
    "LlamaForCausalLM": DENSE_TABLE,
    "MistralForCausalLM": DENSE_TABLE,
    "DeepseekV2ForCausalLM": DEEPSEEK_TABLE,
    "DeepseekV3ForCausalLM": DEEPSEEK_TABLE,
}


def adapter_rows(rows: Iterable[Row], modules: Sequence[str]) -> list[Row]:
    """The rows of low-rank adapters, A [rank, in] and B [out, rank], beside those of the adapted modules' weights.

    A fused module has one A, stored under the fused name, and B's rows as its weight's. Tensor parallelism cuts B
    where it cuts the weight's rows, A where it cuts its columns.
    """
    found = []
    for row in rows:
        module, _, kind = row.megatron.rpartition(".")
        name = module.rpartition(".")[2]
        if kind != "weight" or name not in modules or "experts" in module:
            continue
        stored = [hf.removesuffix(".weight") for hf in row.hf]
        output = {f"{hf}.{LORA_B}": (shape[0], "rank") for hf, shape in zip(stored, row.hf.values(), strict=True)}
        fused = f"{stored[0].rpartition('.')[0]}.{name}"
        inputs = {f"{fused}.{LORA_A}": ("rank", next(iter(row.hf.values()))[1])}
        cuts_rows = row.tp_dim == 0
        found += [
            replace(
                row, megatron=f"{module}.{ADAPTER_A}", hf=inputs, tp_dim=None if cuts_rows else 1, transform="plain"
            ),
            replace(row, megatron=f"{module}.{ADAPTER_B}", hf=output, tp_dim=0 if cuts_rows else None),
        ]
    return found


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """The sizes that rows name."""
    return {
        "vocab": model.vocab_size,
        "value_head": 1,
        "rank": model.adapter_rank if isinstance(model, AdaptedModel) else 0,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "experts": model.num_moe_experts or 0,
        "expert_ffn": model.moe_ffn_hidden_size or 0,
        "shared_ffn": model.moe_shared_expert_intermediate_size or 0,
        "query": model.num_attention_heads * model.kv_channels,
        "key": model.num_query_groups * model.kv_channels,
        "value": model.num_attention_heads * model.value_channels,
        "head": model.kv_channels,
        "q_latent": model.q_lora_rank or 0,
        "kv_latent": model.kv_lora_rank or 0,
        "kv_latent_and_rotary": (model.kv_lora_rank or 0) + model.rotary_channels,
        # of each head the part of its keys that does not rotate, then its values
        "unrotated_key_and_value": model.num_attention_heads
        * (model.kv_channels - model.rotary_channels + model.value_channels),
    }
