"""Tiny models of every family, with random weights under which positions, norms and biases all matter."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ORIGINAL_LENGTH = 16  # of the models that scale their rope
LENGTH = 4 * ORIGINAL_LENGTH
SIZES = {
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# a small base, so that frequencies lie on both sides of the methods' bounds
SCALED: dict[str, Any] = {"rope_theta": 100.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": ORIGINAL_LENGTH, "beta_fast": 2.0, "beta_slow": 0.5}
LLAMA3 = {
    "rope_type": "llama3",
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.8}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "kv_lora_rank": 40,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}
# name -> Hugging Face's model type, and what differs from `SIZES`
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "llama-llama3": ("llama", {"rope_parameters": {**SCALED, **LLAMA3}}),
    "llama-yarn": ("llama", {"rope_parameters": {**SCALED, **YARN}}),
    "llama-yarn-attention": ("llama", {"rope_parameters": {**SCALED, **YARN, "attention_factor": 1.5}}),
    "llama-linear": ("llama", {"rope_parameters": {**SCALED, "rope_type": "linear"}}),
    "smollm": ("llama", {"tie_word_embeddings": True, "hidden_size": 96}),
    "mistral": ("mistral", {"sliding_window": None}),
    "deepseek_v2": (
        "deepseek_v2",
        {**DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy", "n_shared_experts": 2},
    ),
    "deepseek_v2-yarn": (
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": 24, "rope_parameters": {**SCALED, **YARN, **MSCALES}},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            **GROUPS,
            "q_lora_rank": 24,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_parameters": {**SCALED, **YARN, **MSCALES},
        },
    ),
}


def make_family(folder: Path, name: str, **further: Any) -> Path:
    """Save a Hugging Face folder without a tokenizer; `further` are other settings of its configuration."""
    model_type, changes = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **changes, **further}))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim == 1:  # norms are initialised with ones, biases with zeros
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif any(name in key for name in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")):
                    parameter.mul_(6)  # attention to few positions, instead of an even mean over all
                elif key.endswith("mlp.gate.weight"):
                    parameter.mul_(30)  # experts with scores of their own
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder
