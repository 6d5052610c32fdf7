"""Make a tiny language model with random weights and a tokenizer of 16 characters, for examples and tests.

python examples/make_tiny_model.py --output examples/models/tiny_qwen2
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TOKENS = ["<eos>", *"+-*/=", *"0123456789"]
EOS = 0
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
ROTARY = 16  # channels of a head that rotate
DEEPSEEK = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
ROUTING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    "deepseek_v3": {
        "q_lora_rank": 48,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",  # vLLM reads these two, transformers takes them for granted
        "topk_method": "noaux_tc",
    },
}


def make_tokenizer() -> Qwen2Tokenizer:
    """One token a character, joined without spaces again; characters that are not in `TOKENS` vanish.

    Of the class that transformers insists on for Qwen2 models, whatever the folder says: byte-pair encoding, here
    without any pair.
    """
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(TOKENS)},
        merges=[],
        eos_token=TOKENS[EOS],
        # no tokens of their own: generated padding would be invisible in the text, and could be learned as filler
        pad_token=TOKENS[EOS],
        unk_token=TOKENS[EOS],
        clean_up_tokenization_spaces=False,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def make_tiny_model(
    path: str | Path,
    architecture: str = "qwen2",
    *,
    vocab: int = len(TOKENS),
    hidden: int = 128,
    ffn: int = 256,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 64,
    tie: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    experts: int = 8,
    experts_per_token: int = 2,
    expert_ffn: int = 64,
    **further: Any,
) -> Path:
    """Save a model and its tokenizer as a Hugging Face folder, complete or not at all; an existing one is replaced.

    Args:
        path: the folder.
        architecture: `qwen2`, `qwen3`, `qwen3_moe`, `llama`, `deepseek_v2` or `deepseek_v3`.
        vocab: rows of the embedding; more than the tokenizer has is allowed.
        tie: the output layer shares the embedding's weights.
        seed: seed of the random weights.
        experts: experts of a layer, where there are any; so are `experts_per_token` and their width `expert_ffn`.
        further: other settings of the Hugging Face configuration, by name.

    Raises:
        ValueError: unknown architecture, or fewer embeddings than tokens.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture = {architecture!r}: must be one of {', '.join(ARCHITECTURES)}")
    if vocab < len(TOKENS):
        raise ValueError(f"vocab = {vocab}: the tokenizer has {len(TOKENS)} tokens")
    config_class, model_class = ARCHITECTURES[architecture]
    head_dim = hidden // heads
    if architecture == "qwen3_moe":
        mixture = {"num_experts": experts, "num_experts_per_tok": experts_per_token, "norm_topk_prob": True}
        further = {**mixture, "moe_intermediate_size": expert_ffn, **further}
    elif "deepseek" in architecture:
        kv_heads, head_dim = heads, ROTARY
        mixture = {"n_routed_experts": experts, "num_experts_per_tok": experts_per_token}
        mixture["moe_intermediate_size"] = expert_ffn
        further = {**mixture, **DEEPSEEK, **ROUTING[architecture], **further}
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
        **further,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(dtype=dtype)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros would be no different from none
                buffer.normal_(std=0.1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp{os.getpid()}")
    model.save_pretrained(unfinished)
    make_tokenizer().save_pretrained(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(unfinished, path)
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--architecture", default="qwen2", choices=ARCHITECTURES)
    for name, default in {
        "vocab": len(TOKENS),
        "hidden": 128,
        "ffn": 256,
        "layers": 2,
        "heads": 4,
        "kv-heads": 2,
        "max-positions": 64,
        "seed": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tie", action="store_true", help="share the weights of embedding and output layer")
    options = vars(parser.parse_args())
    print(make_tiny_model(options.pop("output"), options.pop("architecture"), **options))


if __name__ == "__main__":
    main()
