"""Rotary frequencies and what multiplies cosines and sines: as transformers', and as the formulas in float64."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.engine.megatron.rotary import attention_scaling, inverse_frequencies

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
QWEN_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    LLAMA31,
    {**LLAMA31, "factor": 32.0, "low_freq_factor": 0.7, "high_freq_factor": 3.1},
    QWEN_YARN,
    {**QWEN_YARN, "attention_factor": 1.25},
    {**QWEN_YARN, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**QWEN_YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    {**QWEN_YARN, "factor": 1.0},
]
HEADS = [64, 128]


def configuration(rope: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=32768,
        rope_parameters=dict(rope),
        architectures=["LlamaForCausalLM"],
    )


def exact(rope: dict[str, Any], head_dim: int) -> list[float]:
    """The papers' formulas, a frequency at a time, in Python's floats."""
    base, factor = rope["rope_theta"], rope.get("factor", 1.0)
    original = rope.get("original_max_position_embeddings")

    def frequency(i: int) -> float:
        plain = base ** (-2 * i / head_dim)
        if rope["rope_type"] == "llama3":
            turns, low, high = original * plain / (2 * math.pi), rope["low_freq_factor"], rope["high_freq_factor"]
            if turns < low or turns > high:
                return plain / factor if turns < low else plain
            share = (turns - low) / (high - low)
        elif rope["rope_type"] == "yarn":
            bounds = [
                head_dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(base))
                for beta in (rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0))
            ]
            if rope.get("truncate", True):
                bounds = [float(math.floor(bounds[0])), float(math.ceil(bounds[1]))]
            share = 1 - min(max((i - bounds[0]) / (bounds[1] - bounds[0]), 0.0), 1.0)
        else:
            share = 0.0
        return share * plain + (1 - share) * plain / factor

    return [frequency(i) for i in range(head_dim // 2)]


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("rope", CASES, ids=lambda rope: rope["rope_type"])
def test_frequencies(rope: dict[str, Any], head_dim: int) -> None:
    config = configuration(rope, head_dim)
    model, theirs = ModelConfig.from_hf(config.to_dict()), LlamaRotaryEmbedding(config)
    found = inverse_frequencies(model, "cpu")
    assert torch.equal(found, theirs.inv_freq)
    assert attention_scaling(model.rope_scaling) == theirs.attention_scaling
    torch.testing.assert_close(found.double(), torch.tensor(exact(rope, head_dim)).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_attention_scaling_of_yarn(changes: dict[str, float], expected: float) -> None:
    model = ModelConfig.from_hf(configuration({**QWEN_YARN, **changes}, 64).to_dict())
    assert attention_scaling(model.rope_scaling) == pytest.approx(expected, rel=1e-12)
