"""DeepSeek-V2 and V3 in the terms of `ModelConfig`: latent attention, groups of experts, shared experts.

What only one of transformers and vLLM computes, or each in its own way, is refused: training and rollout must agree.
"""

from __future__ import annotations

from typing import Any

from mindspeed_rl.config.rope import RopeScaling

REQUIRED_KEYS = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
)


def features(hf: dict[str, Any], rope: RopeScaling | None) -> dict[str, tuple[Any, Any]]:
    """Settings of a `config.json`: what each of them is, and what alone is supported."""
    heads, rotary = hf["num_attention_heads"], hf["qk_rope_head_dim"]
    shared = {
        "num_key_value_heads": (hf.get("num_key_value_heads") or heads, heads),
        "head_dim": (hf.get("head_dim") or rotary, rotary),  # transformers' name for it
        "moe_layer_freq": (hf.get("moe_layer_freq", 1), 1),
        "rms_norm_eps": (hf.get("rms_norm_eps", 1e-6), 1e-6),  # transformers has this one in the latent norms
        "rope_interleave": (hf.get("rope_interleave", True), True),
    }
    if rope is not None:  # vLLM takes any scaling for YaRN, and knows these settings at their defaults only
        shared["rope_type"] = (rope.rope_type, "yarn")
        shared["attention_factor"] = (rope.attention_factor, None)
        shared["truncate"] = (rope.truncate, True)
    if hf["architectures"][0] == "DeepseekV3ForCausalLM":
        # vLLM scores as in V2 where these keys are missing, transformers never
        return {
            **shared,
            "scoring_func": (hf.get("scoring_func"), "sigmoid"),
            "topk_method": (hf.get("topk_method"), "noaux_tc"),
        }
    method = "greedy" if hf["n_group"] == 1 else "group_limited_greedy"
    return {
        **shared,
        "scoring_func": (hf.get("scoring_func", "softmax"), "softmax"),
        "topk_method": (hf.get("topk_method", "greedy"), method),
        "norm_topk_prob": (bool(hf.get("norm_topk_prob")), False),  # transformers ignores it
    }


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of latent attention and experts."""
    is_v3 = hf["architectures"][0] == "DeepseekV3ForCausalLM"
    grouped = hf["n_group"] > 1
    layers, dense = hf["num_hidden_layers"], hf.get("first_k_dense_replace") or 0
    return {
        "kv_channels": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "q_lora_rank": hf.get("q_lora_rank"),
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "num_moe_experts": hf["n_routed_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        "moe_router_score_function": "sigmoid" if is_v3 else "softmax",
        "moe_router_enable_expert_bias": is_v3,
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", is_v3),
        "moe_router_num_groups": hf["n_group"] if grouped else None,
        "moe_router_group_topk": hf["topk_group"] if grouped else None,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_layer_freq": tuple(int(layer >= dense) for layer in range(layers)) if dense else 1,
    }
