"""ModelConfig.from_hf against the configurations transformers writes."""

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from mindspeed_rl.config.model import ModelConfig

SIZES = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
CLASSES = [
    (Qwen2Config, "Qwen2ForCausalLM"),
    (Qwen3Config, "Qwen3ForCausalLM"),
    (LlamaConfig, "LlamaForCausalLM"),
]
OLD_FILE = {  # as transformers 4 wrote it: rope settings at the top level, no head_dim
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(("config_class", "architecture"), CLASSES)
@pytest.mark.parametrize("tie", [False, True])
def test_saved_configurations_of_each_family(config_class, architecture, tie, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    config = config_class(**SIZES, tie_word_embeddings=tie, rope_parameters=rope, architectures=[architecture])
    config.save_pretrained(tmp_path)
    model = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert model == ModelConfig(
        architecture=architecture,
        num_layers=3,
        hidden_size=48,
        ffn_hidden_size=96,
        num_attention_heads=6,
        num_query_groups=2,
        kv_channels=128 if config_class is Qwen3Config else 8,
        vocab_size=100,
        max_position_embeddings=512,
        norm_epsilon=1e-5,
        rotary_base=500000.0,
        untie_embeddings_and_output_weights=not tie,
        add_qkv_bias=config_class is Qwen2Config,
        qk_layernorm=config_class is Qwen3Config,
    )


def test_file_of_an_older_transformers():
    model = ModelConfig.from_hf(OLD_FILE)
    assert (model.kv_channels, model.rotary_base, model.add_qkv_bias) == (128, 1e6, True)
    assert model.num_parameters == 7_615_616_512  # published size of Qwen2.5-7B


@pytest.mark.parametrize(("model_type", "architecture"), [("qwen3", CLASSES[1][1]), ("llama", CLASSES[2][1])])
def test_absent_head_dim_means_what_transformers_takes_it_for(model_type, architecture):
    hf = {"architectures": [architecture], **SIZES}
    assert ModelConfig.from_hf(hf).kv_channels == AutoConfig.for_model(model_type, **SIZES).head_dim


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures = \['GPT2LMHeadModel'\]"),
        ({"architectures": None}, "architectures = None"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type = 'llama3'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"hidden_size": None, "vocab_size": None}, "Qwen2ForCausalLM lacks hidden_size, vocab_size"),
        ({"num_key_value_heads": 5}, "num_attention_heads = 28 is not a multiple of num_query_groups = 5"),
        ({"num_hidden_layers": 0}, "num_layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**OLD_FILE, **changes})


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}


def moe_json(tmp_path, **changes) -> dict:
    """A config.json as transformers writes it, of a mixture of experts."""
    config = Qwen3MoeConfig(**{**SIZES, **EXPERTS, **changes}, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def test_a_mixture_of_experts(tmp_path):
    model = ModelConfig.from_hf(moe_json(tmp_path))
    assert (model.num_moe_experts, model.moe_router_topk, model.moe_ffn_hidden_size) == (8, 3, 20)
    assert (model.moe_router_pre_softmax, model.moe_layer_freq, model.qk_layernorm) == (False, 1, True)
    published = {key: value for key, value in moe_json(tmp_path).items() if key != "num_local_experts"}
    assert ModelConfig.from_hf({**published, **EXPERTS}) == model  # the name in the files of Qwen's own
    assert ModelConfig.from_hf(moe_json(tmp_path, norm_topk_prob=False)).moe_router_pre_softmax


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, (0, 1, 0)),
        ({"mlp_only_layers": [0]}, (0, 1, 1)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [2]}, (0, 1, 0)),
        ({"mlp_only_layers": []}, 1),
    ],
)
def test_layers_without_experts(changes, layers, tmp_path):
    hf = moe_json(tmp_path, **changes)
    model = ModelConfig.from_hf(hf)
    assert model.moe_layer_freq == layers
    assert ModelConfig(**json.loads(model.model_dump_json())) == model
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    assert [model.is_moe_layer(index) for index in range(3)] == [
        hasattr(layer.mlp, "experts") for layer in reference.model.layers
    ]
    assert model.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    unused = sum(model.is_moe_layer(layer) for layer in range(3)) * (8 - 3) * 3 * 48 * 20
    assert model.active_parameters == model.num_parameters - unused
    assert model.matmul_parameters == model.active_parameters - 100 * 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": None, "moe_intermediate_size": None}, "lacks num_experts, moe_intermediate_size"),
        ({"num_experts_per_tok": 9}, "moe_router_topk = 9 of num_moe_experts = 8"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0 is not supported"),
        ({"mlp_only_layers": [0, 1, 2]}, r"moe_layer_freq = \[0, 0, 0\]"),
    ],
)
def test_what_a_mixture_of_experts_must_say(changes, message, tmp_path):
    hf = {**moe_json(tmp_path), **changes}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf)


def test_fields_of_experts_are_for_models_with_experts(tmp_path):
    dense = ModelConfig.from_hf(OLD_FILE).model_dump()
    for key, value in {"num_moe_experts": 4, "moe_router_pre_softmax": True, "moe_layer_freq": (0, 1)}.items():
        with pytest.raises(ValueError, match=f"{key} = .*, but Qwen2ForCausalLM has no experts"):
            ModelConfig(**{**dense, key: value})
    with pytest.raises(ValueError, match="moe_router_topk is required for Qwen3MoeForCausalLM"):
        ModelConfig(**{**dense, "architecture": "Qwen3MoeForCausalLM", "num_moe_experts": 4})
