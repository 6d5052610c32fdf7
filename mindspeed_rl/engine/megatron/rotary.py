"""The frequencies of the rotary position embedding, plain and scaled for longer sequences.

Megatron-core has two of the methods, with some of their parameters fixed; here all have all of Hugging Face's.
Operations are those of transformers and vLLM in the same order, so that the float32 results are equal bit for bit:
at position 100,000 the last bit of a frequency turns the angle by 0.006. (`linear` alone vLLM applies to positions.)
"""

from __future__ import annotations

import math

import torch

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rope import RopeScaling


def inverse_frequencies(model: ModelConfig, device: torch.device | str) -> torch.Tensor:
    """[rotating channels of a head / 2] float32: radians per token of each pair of channels.

    Plain: base^(-2i/d) (arXiv:2104.09864). `linear`: all divided by `factor` (arXiv:2306.15595).
    """
    size = model.rotary_channels
    channels = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    periods = model.rotary_base**channels  # in tokens per radian
    plain, scaling = 1.0 / periods, model.rope_scaling
    if scaling is None:
        return plain
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling)
    if scaling.rope_type == "yarn":
        return _yarn(plain, 1.0 / (scaling.factor * periods), model, scaling)
    return plain / scaling.factor


def attention_scaling(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied with, so that scores grow by its square.

    YaRN: 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4); with the two `mscale`s, the ratio of such terms
    (DeepSeek-V2's configuration).
    """
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _grown(scaling.factor, scaling.mscale) / _grown(scaling.factor, scaling.mscale_all_dim)
    return _grown(scaling.factor)


def _grown(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divided below `low_freq_factor` turns in the original length, plain above `high_freq_factor`, linear between.

    As in the code that Meta published with Llama 3.1.
    """
    original, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    assert original
    assert low
    assert high
    turns = original / (2 * math.pi / plain)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: torch.Tensor, divided: torch.Tensor, model: ModelConfig, scaling: RopeScaling) -> torch.Tensor:
    """As `_llama3`, but linear in the index of the frequency ("NTK by parts", arXiv:2309.00071, section 3.2)."""
    original, size = scaling.original_max_position_embeddings, model.rotary_channels
    assert original

    def index(turns: float) -> float:
        """Of the frequency that makes so many turns in the original length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    indices = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    keep = 1 - ((indices - first) / (last - first)).clamp(0, 1)
    return divided * (1 - keep) + plain * keep
