"""The shape of a model: one class for presets in `configs/model/` and for Hugging Face `config.json` files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from mindspeed_rl.config import deepseek
from mindspeed_rl.config.rope import RopeScaling, rope_from_hf

Architecture = Literal[
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
]
DEEPSEEK_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")  # latent attention and experts
MOE_ARCHITECTURES = ("Qwen3MoeForCausalLM", *DEEPSEEK_ARCHITECTURES)
_REQUIRED_KEYS: tuple[str, ...] = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_DEEPSEEK_EXPERTS = (
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
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
    kv_channels: PositiveInt = Field(
        description="dimension of one attention head; with latent attention, of its queries and keys"
    )
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
    # latent attention (MLA): keys and values are computed from one short vector a token (arXiv:2405.04434, 2.1)
    kv_lora_rank: PositiveInt | None = Field(
        None, description="length of the vector that keys and values come from; null: no latent attention"
    )
    q_lora_rank: PositiveInt | None = Field(
        None, description="latent attention: length of the vector that queries come from; null: of the layer's input"
    )
    qk_pos_emb_head_dim: PositiveInt | None = Field(
        None, description="latent attention: the last so many of `kv_channels` rotate with the position"
    )
    v_head_dim: PositiveInt | None = Field(None, description="latent attention: dimension of a head's values")
    # mixture of experts: layers whose MLP is a router and experts, of which each token uses a few
    num_moe_experts: PositiveInt | None = Field(None, description="experts of a layer; null: no layer has any")
    moe_router_topk: PositiveInt | None = Field(None, description="experts that a token is sent to")
    moe_ffn_hidden_size: PositiveInt | None = Field(None, description="width of the gated MLP that an expert is")
    moe_router_pre_softmax: bool = Field(
        False,
        description="the weights of a token's experts are their shares among all experts; false: they add up to 1 "
        "(Hugging Face: `norm_topk_prob: true`)",
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="what makes scores of a router's logits"
    )
    moe_router_enable_expert_bias: bool = Field(
        False,
        description="a bias of each expert is added to its score for the choice, not in the weight; fixed in RL",
    )
    moe_router_num_groups: PositiveInt | None = Field(None, description="groups of experts, to choose among first")
    moe_router_group_topk: PositiveInt | None = Field(None, description="groups that a token's experts come from")
    moe_router_topk_scaling_factor: PositiveFloat = Field(
        1.0, description="the weights of a token's experts are multiplied with it"
    )
    moe_shared_expert_intermediate_size: PositiveInt | None = Field(
        None, description="width of the gated MLP that all tokens pass beside their experts; null: there is none"
    )
    moe_layer_freq: Literal[1] | tuple[Literal[0, 1], ...] = Field(
        1, description="1: every layer has experts; or for each layer 1, or 0 for one MLP of `ffn_hidden_size`"
    )

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> Self:
        """Derive the shape from the contents of a Hugging Face `config.json`.

        Raises:
            ValueError: a key is missing, or the architecture or a feature of it (a method of rope scaling, layers
                that differ in attention, another activation, quantized weights, a bias the weight-name table lacks)
                is not supported; names the key and value.
        """
        architecture = (hf.get("architectures") or [None])[0]
        if architecture not in get_args(Architecture):
            raise ValueError(f"architectures = {hf.get('architectures')!r} is not supported")
        is_moe, is_deepseek = architecture == "Qwen3MoeForCausalLM", architecture in DEEPSEEK_ARCHITECTURES
        if is_moe:  # transformers 5 writes another name
            hf = {**hf, "num_experts": hf.get("num_experts") or hf.get("num_local_experts")}
        required = _REQUIRED_KEYS
        required += _REQUIRED_MOE_KEYS if is_moe else deepseek.REQUIRED_KEYS if is_deepseek else ()
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
            **(deepseek.features(hf, rope_scaling) if is_deepseek else {}),
        }
        if hf.get("quantization_config") is not None:
            found = f"quantization_config = {hf['quantization_config']!r} is not supported"
            raise ValueError(f"{found}: convert the weights to bfloat16, and remove the key")
        for key, (value, supported) in features.items():
            if value != supported:
                raise ValueError(f"{key} = {value!r} is not supported for {architecture} (only {supported!r})")
        heads = hf["num_attention_heads"]
        # Qwen3's heads do not divide its hidden size; files without the key mean the class's default
        default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hf["hidden_size"] // heads
        fields: dict[str, Any] = {
            "architecture": architecture,
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "ffn_hidden_size": hf["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": hf.get("num_key_value_heads") or heads,
            "kv_channels": hf.get("head_dim") or default_head_dim,
            "vocab_size": hf["vocab_size"],
            "max_position_embeddings": hf["max_position_embeddings"],
            "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
            "rotary_base": rotary_base,
            "rope_scaling": rope_scaling,
            # a file without the key means the class's default
            "sliding_window": hf.get("sliding_window", 4096) if architecture == "MistralForCausalLM" else None,
            "untie_embeddings_and_output_weights": not hf.get("tie_word_embeddings", False),
            "add_qkv_bias": architecture == "Qwen2ForCausalLM",
            "qk_layernorm": architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        }
        return cls(**fields | (_moe_fields(hf) if is_moe else deepseek.fields(hf) if is_deepseek else {}))

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
    def _check_latent_attention(self) -> ModelConfig:
        for key in ("kv_lora_rank", "q_lora_rank", "qk_pos_emb_head_dim", "v_head_dim"):
            value = getattr(self, key)
            if value is not None and self.architecture not in DEEPSEEK_ARCHITECTURES:
                raise ValueError(f"{key} = {value!r}, but {self.architecture} has no latent attention")
            if value is None and self.architecture in DEEPSEEK_ARCHITECTURES and key != "q_lora_rank":
                raise ValueError(f"{key} is required for {self.architecture}")
        if self.kv_lora_rank is not None and self.num_query_groups != self.num_attention_heads:
            raise ValueError(
                f"num_query_groups = {self.num_query_groups}: latent attention has as many key/value heads as "
                f"num_attention_heads = {self.num_attention_heads}"
            )
        for key in ("add_qkv_bias", "qk_layernorm", "sliding_window"):
            if getattr(self, key) and self.kv_lora_rank is not None:
                raise ValueError(f"{key} = {getattr(self, key)!r}, but {self.architecture} has latent attention")
        for key in ("qk_pos_emb_head_dim", "v_head_dim"):
            if (getattr(self, key) or 0) > self.kv_channels:
                raise ValueError(f"{key} = {getattr(self, key)} is more than kv_channels = {self.kv_channels}")
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> ModelConfig:
        for key, value in self:
            default = type(self).model_fields[key].default
            if "moe" not in key:
                continue
            if self.architecture not in MOE_ARCHITECTURES and value != default:
                raise ValueError(f"{key} = {value!r}, but {self.architecture} has no experts")
            if self.architecture not in DEEPSEEK_ARCHITECTURES and key in _DEEPSEEK_EXPERTS and value != default:
                raise ValueError(f"{key} = {value!r} is not supported for {self.architecture} (only {default!r})")
        for key in ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"):
            if self.architecture in MOE_ARCHITECTURES and getattr(self, key) is None:
                raise ValueError(f"{key} is required for {self.architecture}")
        if self.num_moe_experts is None or self.moe_router_topk is None:
            return self
        self._check_groups(self.num_moe_experts, self.moe_router_topk)
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

    def _check_groups(self, experts: int, topk: int) -> None:
        has_bias, is_v3 = self.moe_router_enable_expert_bias, self.architecture == "DeepseekV3ForCausalLM"
        score = "sigmoid" if is_v3 else "softmax"
        if has_bias != is_v3 or self.moe_router_score_function != score:
            raise ValueError(
                f"moe_router_enable_expert_bias = {has_bias}, moe_router_score_function = "
                f"{self.moe_router_score_function!r}: {self.architecture} has {is_v3} and {score!r}"
            )
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None and chosen is None:
            return
        said = f"moe_router_num_groups = {groups}, moe_router_group_topk = {chosen}"
        if (
            groups is None
            or chosen is None
            or experts % groups
            or chosen > groups
            or experts // groups < (2 if is_v3 else 1)  # V3 scores a group by its best two
            or topk > chosen * experts // groups
        ):
            raise ValueError(f"{said} cannot hold moe_router_topk = {topk} of num_moe_experts = {experts}")

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts."""
        if self.moe_layer_freq == 1:
            return self.num_moe_experts is not None
        return self.moe_layer_freq[layer] == 1

    @property
    def longest_sequence(self) -> int:
        """Most tokens that it is made for."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @property
    def num_moe_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.is_moe_layer(layer) for layer in range(self.num_layers))

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that rotate with the position."""
        return self.qk_pos_emb_head_dim or self.kv_channels

    @property
    def value_channels(self) -> int:
        """Dimension of a head's values."""
        return self.v_head_dim or self.kv_channels

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values come from one short vector a token."""
        return self.kv_lora_rank is not None

    @property
    def has_query_projection(self) -> bool:
        """Whether latent attention computes queries from the layer's input directly."""
        return self.has_latent_attention and self.q_lora_rank is None

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
    def has_output_layer(self) -> bool:
        """Logits for each token."""
        return True

    @property
    def has_value_head(self) -> bool:
        """One value for each token."""
        return False

    def as_critic(self) -> CriticModel:
        """The same with a value head in place of the output layer."""
        return CriticModel(**{**dict(self), "untie_embeddings_and_output_weights": True})

    def with_value_head(self) -> SharedModel:
        """The same with a value head beside the output layer."""
        return SharedModel(**dict(self))

    def with_adapters(self, rank: int, modules: Sequence[str]) -> AdaptedModel:
        """The same with low-rank adapters beside the named linear layers of every layer that has them."""
        kinds = {ModelConfig: AdaptedModel, CriticModel: AdaptedCritic, SharedModel: AdaptedShared}
        return kinds[type(self)](**dict(self), adapter_rank=rank, adapted_modules=tuple(modules))

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        hidden = self.hidden_size
        layers = self.num_layers * (self._attention_parameters() + 2 * hidden)
        mlps = (self.num_layers - self.num_moe_layers) * 3 * hidden * self.ffn_hidden_size
        shared = self.num_moe_layers * 3 * hidden * (self.moe_shared_expert_intermediate_size or 0)
        has_output_weight = self.has_output_layer and self.untie_embeddings_and_output_weights
        embeddings = self.vocab_size * hidden * (2 if has_output_weight else 1)
        embeddings += hidden if self.has_value_head else 0
        return layers + mlps + shared + self._router_parameters() + self.expert_parameters + embeddings + hidden

    def _router_parameters(self) -> int:
        bias = 1 if self.moe_router_enable_expert_bias else 0
        return self.num_moe_layers * (self.hidden_size + bias) * (self.num_moe_experts or 0)

    def _attention_parameters(self) -> int:
        """Of one layer, without the norm before it."""
        head_dim, hidden, heads = self.kv_channels, self.hidden_size, self.num_attention_heads
        q_size, kv_size = heads * head_dim, self.num_query_groups * head_dim
        if self.kv_lora_rank is not None:
            query, latents = self.q_lora_rank or hidden, self.kv_lora_rank + (self.q_lora_rank or 0)
            unrotated = head_dim - self.rotary_channels
            key_value = self.kv_lora_rank * heads * (unrotated + self.value_channels)
            output = heads * self.value_channels * hidden
            return self._down_projections() + latents + query * q_size + key_value + output
        attention = hidden * (q_size + 2 * kv_size) + q_size * hidden
        bias = q_size + 2 * kv_size if self.add_qkv_bias else 0
        return attention + bias + (2 * head_dim if self.qk_layernorm else 0)

    def _down_projections(self) -> int:
        """Latent attention's weights, of one layer, that make the short vectors."""
        if self.kv_lora_rank is None:
            return 0
        return self.hidden_size * ((self.q_lora_rank or 0) + self.kv_lora_rank + self.rotary_channels)

    @property
    def replicated_parameters(self) -> int:
        """Matrices that tensor parallelism does not divide: routers, and latent attention's down-projections."""
        return self._router_parameters() + self.num_layers * self._down_projections()

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
        """FLOPs of one forward pass over each sequence of s tokens: 2·N·s + layers·heads·(d + v)·s².

        N are the matmul parameters, d the dimension of a head's queries and keys, v that of its values, mostly the
        same. Attention: scores cost 2·s²·heads·d, their weighted sum 2·s²·heads·v, of which the causal mask leaves
        half (arXiv:2204.02311, appendix B, without and with causality).
        """
        linear = 2 * self.matmul_parameters
        quadratic = self.num_layers * self.num_attention_heads * (self.kv_channels + self.value_channels)
        return [linear * length + quadratic * length**2 for length in sequence_lengths]


class CriticModel(ModelConfig):
    """A model with a value head in place of the output layer; so that shares nothing with the embedding."""

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> Self:
        """Derive the shape from the `config.json` of a sequence classification with one label.

        Raises:
            ValueError: it is no such model, or one of a language model that is not supported; names key and value.
        """
        named, suffix = (hf.get("architectures") or [None])[0], "ForSequenceClassification"
        if not str(named).endswith(suffix):
            raise ValueError(f"architectures = {hf.get('architectures')!r}: is no …{suffix}, a model with a score")
        labels = hf.get("num_labels") or len(hf.get("id2label") or (0, 1))  # not written where it is the default
        if labels != 1:
            raise ValueError(f"num_labels = {labels} (the length of id2label): a reward is one number (only 1)")
        body = str(named).removesuffix(suffix) + "ForCausalLM"
        return super().from_hf({**hf, "architectures": [body], "tie_word_embeddings": False})

    @property
    def has_output_layer(self) -> bool:
        """No logits."""
        return False

    @property
    def has_value_head(self) -> bool:
        """One value for each token."""
        return True


class SharedModel(ModelConfig):
    """Policy and critic on the same layers."""

    @property
    def has_value_head(self) -> bool:
        """One value for each token, beside logits."""
        return True


class AdaptedModel(ModelConfig):
    """A model with low-rank adapters: what training holds. Others see the model that adapters are merged into."""

    adapter_rank: PositiveInt
    adapted_modules: tuple[str, ...]


class AdaptedCritic(AdaptedModel, CriticModel):
    """A critic with adapters."""


class AdaptedShared(AdaptedModel, SharedModel):
    """Policy and critic on the same layers, with adapters."""


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
