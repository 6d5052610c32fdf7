"""The shape of a model: one class for presets in `configs/model/` and for Hugging Face `config.json` files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from mindspeed_rl.config.rope import RopeScaling, rope_from_hf

Architecture = Literal["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"]
_REQUIRED_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


class ModelConfig(BaseModel):
    """A decoder-only transformer in Megatron's key names. Immutable; two equal shapes compare equal."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: Architecture = Field(description="Hugging Face architecture; selects the weight-name table")
    num_layers: PositiveInt = Field(description="transformer layers")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    ffn_hidden_size: PositiveInt = Field(description="width of the gated MLP (SwiGLU)")
    num_attention_heads: PositiveInt = Field(description="number of query heads")
    num_query_groups: PositiveInt = Field(description="number of key/value heads")
    kv_channels: PositiveInt = Field(description="dimension of one attention head")
    vocab_size: PositiveInt = Field(description="rows of the embedding as stored in the checkpoint")
    max_position_embeddings: PositiveInt = Field(
        description="longest sequence in tokens; may be less than the checkpoint was made for"
    )
    norm_epsilon: PositiveFloat = Field(1e-6, description="epsilon of RMSNorm")
    rotary_base: PositiveFloat = Field(10000.0, description="base of the rotary position embedding (rope theta)")
    rope_scaling: RopeScaling | None = Field(None, description="how the rotary position embedding is stretched")
    sliding_window: PositiveInt | None = Field(
        None, description="tokens that attention looks back over (Mistral); longer sequences are refused"
    )
    untie_embeddings_and_output_weights: bool = Field(True, description="false: the output layer uses the embedding")
    add_qkv_bias: bool = Field(False, description="bias in the query, key and value projections (Qwen2)")
    qk_layernorm: bool = Field(False, description="RMSNorm on each query and key head (Qwen3)")

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelConfig:
        """Derive the shape from the contents of a Hugging Face `config.json`.

        Raises:
            ValueError: a key is missing, or the architecture or a feature of it (a method of rope scaling, layers
                that differ in attention, another activation, quantized weights, a bias the weight-name table lacks)
                is not supported; names the key and value.
        """
        architecture = (hf.get("architectures") or [None])[0]
        if architecture not in get_args(Architecture):
            raise ValueError(f"architectures = {hf.get('architectures')!r} is not supported")
        missing = [key for key in _REQUIRED_KEYS if hf.get(key) is None]
        if missing:
            raise ValueError(f"the configuration of {architecture} lacks {', '.join(missing)}")
        rotary_base, rope_scaling = rope_from_hf(hf)
        features = {
            "hidden_act": (hf.get("hidden_act", "silu"), "silu"),
            "use_sliding_window": (bool(hf.get("use_sliding_window")), False),
            "layer_types": (sorted(set(hf.get("layer_types") or ["full_attention"])), ["full_attention"]),
            "mlp_bias": (bool(hf.get("mlp_bias")), False),
            "attention_bias": (bool(hf.get("attention_bias")), False),
            "quantization_config": (hf.get("quantization_config"), None),
        }
        for key, (value, supported) in features.items():
            if value != supported:
                raise ValueError(f"{key} = {value!r} is not supported for {architecture} (only {supported!r})")
        heads = hf["num_attention_heads"]
        # Qwen3's heads do not divide its hidden size; files without the key mean the class's default
        default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hf["hidden_size"] // heads
        return cls(
            architecture=architecture,
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_hidden_size=hf["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=hf.get("num_key_value_heads") or heads,
            kv_channels=hf.get("head_dim") or default_head_dim,
            vocab_size=hf["vocab_size"],
            max_position_embeddings=hf["max_position_embeddings"],
            norm_epsilon=hf.get("rms_norm_eps", 1e-6),
            rotary_base=rotary_base,
            rope_scaling=rope_scaling,
            # a file without the key means the class's default
            sliding_window=hf.get("sliding_window", 4096) if architecture == "MistralForCausalLM" else None,
            untie_embeddings_and_output_weights=not hf.get("tie_word_embeddings", False),
            add_qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_layernorm=architecture == "Qwen3ForCausalLM",
        )

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_query_groups = {self.num_query_groups}"
            )
        length = self.rope_scaling and self.rope_scaling.yarn_length
        if length and self.max_position_embeddings > length:
            raise ValueError(
                f"max_position_embeddings = {self.max_position_embeddings} is more than rope_scaling.factor x "
                f"original_max_position_embeddings = {length:g}"
            )
        return self

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding held by all tensor-parallel ranks together; the surplus rows are masked out."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        head_dim, hidden = self.kv_channels, self.hidden_size
        q_size, kv_size = self.num_attention_heads * head_dim, self.num_query_groups * head_dim
        attention = hidden * (q_size + 2 * kv_size) + q_size * hidden
        bias = q_size + 2 * kv_size if self.add_qkv_bias else 0
        qk_norm = 2 * head_dim if self.qk_layernorm else 0
        layer = attention + bias + qk_norm + 3 * hidden * self.ffn_hidden_size + 2 * hidden
        embeddings = self.vocab_size * hidden * (2 if self.untie_embeddings_and_output_weights else 1)
        return self.num_layers * layer + embeddings + hidden

    @property
    def matmul_parameters(self) -> int:
        """Weights every token is multiplied with: all but an input embedding of its own (a look-up is free)."""
        lookup = self.vocab_size * self.hidden_size if self.untie_embeddings_and_output_weights else 0
        return self.num_parameters - lookup

    def forward_flops(self, sequence_lengths: Iterable[int]) -> list[int]:
        """FLOPs of one forward pass over each sequence of s tokens: 2·N·s + 2·layers·heads·head_dim·s².

        N are the matmul parameters. Attention: scores and their weighted sum cost 2·s²·heads·head_dim each, times two
        operations, of which the causal mask leaves half (arXiv:2204.02311, appendix B, without and with causality).
        """
        linear = 2 * self.matmul_parameters
        quadratic = 2 * self.num_layers * self.num_attention_heads * self.kv_channels
        return [linear * length + quadratic * length**2 for length in sequence_lengths]
