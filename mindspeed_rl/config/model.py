"""The shape of a model: one class for presets in `configs/model/` and for Hugging Face `config.json` files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from mindspeed_rl.config.rope import RopeScaling, rope_from_hf

Architecture = Literal[
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"
]
MOE_ARCHITECTURES = ("Qwen3MoeForCausalLM",)
_REQUIRED_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_REQUIRED_MOE_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


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
    # mixture of experts: layers whose MLP is a router and experts, of which each token uses a few
    num_moe_experts: PositiveInt | None = Field(None, description="experts of a layer; null: no layer has any")
    moe_router_topk: PositiveInt | None = Field(None, description="experts that a token is sent to")
    moe_ffn_hidden_size: PositiveInt | None = Field(None, description="width of the gated MLP that an expert is")
    moe_router_pre_softmax: bool = Field(
        False,
        description="the weights of a token's experts are their shares among all experts; false: they add up to 1 "
        "(Hugging Face: `norm_topk_prob: true`)",
    )
    moe_layer_freq: Literal[1] | tuple[Literal[0, 1], ...] = Field(
        1, description="1: every layer has experts; or for each layer 1, or 0 for one MLP of `ffn_hidden_size`"
    )

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
        is_moe = architecture in MOE_ARCHITECTURES
        if is_moe:  # transformers 5 writes another name
            hf = {**hf, "num_experts": hf.get("num_experts") or hf.get("num_local_experts")}
        required = _REQUIRED_KEYS + (_REQUIRED_MOE_KEYS if is_moe else ())
        missing = [key for key in required if hf.get(key) is None]
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
            qk_layernorm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            **(_moe_fields(hf) if is_moe else {}),
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

    @model_validator(mode="after")
    def _check_experts(self) -> ModelConfig:
        for key, value in self:
            if "moe" not in key:
                continue
            if self.architecture not in MOE_ARCHITECTURES and value != type(self).model_fields[key].default:
                raise ValueError(f"{key} = {value!r}, but {self.architecture} has no experts")
            if self.architecture in MOE_ARCHITECTURES and value is None:
                raise ValueError(f"{key} is required for {self.architecture}")
        if self.num_moe_experts is None or self.moe_router_topk is None:
            return self
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(f"moe_router_topk = {self.moe_router_topk} of num_moe_experts = {self.num_moe_experts}")
        if self.moe_layer_freq != 1 and not (
            len(self.moe_layer_freq) == self.num_layers and 0 < sum(self.moe_layer_freq) < self.num_layers
        ):
            raise ValueError(
                f"moe_layer_freq = {list(self.moe_layer_freq)}: must be 1, or a 0 or 1 for each of num_layers = "
                f"{self.num_layers} layers, both of them occurring"
            )
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts."""
        if self.moe_layer_freq == 1:
            return self.num_moe_experts is not None
        return self.moe_layer_freq[layer] == 1

    @property
    def num_moe_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.is_moe_layer(layer) for layer in range(self.num_layers))

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding held by all tensor-parallel ranks together; the surplus rows are masked out."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts, which expert parallelism divides; routers are not among them."""
        return self._expert_parameters(self.num_moe_experts or 0)

    def _expert_parameters(self, experts: int) -> int:
        return self.num_moe_layers * experts * 3 * self.hidden_size * (self.moe_ffn_hidden_size or 0)

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        head_dim, hidden = self.kv_channels, self.hidden_size
        q_size, kv_size = self.num_attention_heads * head_dim, self.num_query_groups * head_dim
        attention = hidden * (q_size + 2 * kv_size) + q_size * hidden
        bias = q_size + 2 * kv_size if self.add_qkv_bias else 0
        qk_norm = 2 * head_dim if self.qk_layernorm else 0
        layers = self.num_layers * (attention + bias + qk_norm + 2 * hidden)
        mlps = (self.num_layers - self.num_moe_layers) * 3 * hidden * self.ffn_hidden_size
        routers = self.num_moe_layers * hidden * (self.num_moe_experts or 0)
        embeddings = self.vocab_size * hidden * (2 if self.untie_embeddings_and_output_weights else 1)
        return layers + mlps + routers + self.expert_parameters + embeddings + hidden

    @property
    def active_parameters(self) -> int:
        """Number of weights that one token uses: all but the experts that it is not sent to."""
        return self.num_parameters - self.expert_parameters + self._expert_parameters(self.moe_router_topk or 0)

    @property
    def matmul_parameters(self) -> int:
        """Weights every token is multiplied with: active ones but an input embedding of its own, a free look-up."""
        lookup = self.vocab_size * self.hidden_size if self.untie_embeddings_and_output_weights else 0
        return self.active_parameters - lookup

    def forward_flops(self, sequence_lengths: Iterable[int]) -> list[int]:
        """FLOPs of one forward pass over each sequence of s tokens: 2·N·s + 2·layers·heads·head_dim·s².

        N are the matmul parameters. Attention: scores and their weighted sum cost 2·s²·heads·head_dim each, times two
        operations, of which the causal mask leaves half (arXiv:2204.02311, appendix B, without and with causality).
        """
        linear = 2 * self.matmul_parameters
        quadratic = 2 * self.num_layers * self.num_attention_heads * self.kv_channels
        return [linear * length + quadratic * length**2 for length in sequence_lengths]


def _moe_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of a mixture of experts, of Qwen3-MoE's `config.json`."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not (isinstance(step, int) and step >= 1):
        raise ValueError(f"decoder_sparse_step = {step!r} is not supported (only 1 and more)")
    layers = tuple(int(layer not in dense and (layer + 1) % step == 0) for layer in range(hf["num_hidden_layers"]))
    return {
        "num_moe_experts": hf["num_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_layer_freq": 1 if all(layers) else layers,
    }
