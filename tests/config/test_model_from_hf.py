"""ModelConfig.from_hf against the configurations transformers writes."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rope import RopeScaling

CONFIGS = Path(__file__).parents[2] / "configs"
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
    (MistralConfig, "MistralForCausalLM"),
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
_LLAMA3_SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# preset -> what the published config.json says
PUBLISHED_FILES = {
    "qwen25_7b": OLD_FILE,
    "qwen3_8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "llama31_8b": {
        **_LLAMA3_SIZES,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    "llama32_1b": {
        **_LLAMA3_SIZES,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


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
        sliding_window=4096 if config_class is MistralConfig else None,  # the class's default
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


@pytest.mark.parametrize("preset", PUBLISHED_FILES)
def test_presets_say_what_the_published_files_say(preset):
    content = OmegaConf.load(CONFIGS / "model" / f"{preset}.yaml")
    assert ModelConfig(**OmegaConf.to_container(content)[preset]) == ModelConfig.from_hf(PUBLISHED_FILES[preset])


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {**YARN, "attention_factor": 1.5, "beta_fast": 20}])
def test_rope_scaling_in_files_of_both_kinds(scaling):
    old = {"rope_theta": 1e6, "rope_scaling": scaling}
    older = {"rope_theta": 1e6, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in scaling.items()}}
    new = {"rope_theta": None, "rope_parameters": {**scaling, "rope_theta": 1e6}}
    models = [ModelConfig.from_hf({**OLD_FILE, **changes}) for changes in (old, older, new)]
    assert models[0] == models[1] == models[2]
    assert (models[0].rotary_base, models[0].rope_scaling) == (1e6, RopeScaling(**scaling))
    assert ModelConfig(**models[0].model_dump()) == models[0]  # as a checkpoint records it
    with pytest.raises(ValueError, match="frozen"):
        models[0].rope_scaling.factor = 2.0


@pytest.mark.parametrize(("given", "expected"), [(None, 32768), (4096, 4096)])
def test_original_length_is_the_one_that_transformers_takes(given, expected):
    scaling = {**YARN, "factor": 8.0, "beta_fast": None, "original_max_position_embeddings": given}
    found = ModelConfig.from_hf({**OLD_FILE, "rope_scaling": scaling}).rope_scaling
    assert (found.original_max_position_embeddings, found.beta_fast) == (expected, 32.0)
    theirs = {key: value for key, value in scaling.items() if value is not None}
    config = AutoConfig.for_model("qwen2", **{**OLD_FILE, "rope_scaling": theirs})
    assert config.rope_parameters["original_max_position_embeddings"] == expected


@pytest.mark.parametrize(
    ("changes", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)]
)
def test_sliding_window_of_mistral(changes, window):
    file = {key: value for key, value in OLD_FILE.items() if "window" not in key}
    assert ModelConfig.from_hf({**file, **changes}).sliding_window is None  # Qwen2 has a switch for it
    found = ModelConfig.from_hf({**file, "architectures": ["MistralForCausalLM"], **changes})
    assert found.sliding_window == AutoConfig.for_model("mistral", **{**file, **changes}).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures = \['GPT2LMHeadModel'\]"),
        ({"architectures": None}, "architectures = None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e5}}, "rope_type = 'longrope'"),
        ({"rope_parameters": {"rope_theta": 5e5, "full_attention": {}}}, r"rope_parameters\.full_attention = {}"),
        ({"rope_scaling": {**YARN, "finetuned": True}}, r"rope_scaling\.finetuned = True is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor = .*'yarn'.*: Field required"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, r"rope_scaling\.factor = 0\.5: .*greater than or equal to 1"),
        ({"rope_scaling": {**YARN, "factor": "x"}}, r"rope_scaling\.factor = 'x': .*valid number"),
        ({"rope_scaling": {**YARN, "low_freq_factor": 2}}, r"low_freq_factor = 2\.0 has no meaning .* 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "truncate": False}}, "truncate = False has no meaning"),
        ({"rope_scaling": {**YARN, "beta_slow": 40}}, r"beta_slow = 40\.0 is above beta_fast = 32\.0"),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, r"mscale = 0\.7, mscale_all_dim = None"),
        (
            {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "attention_factor": 2.0}},
            r"mscale = 0\.7 would be ignored",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1}},
            r"low_freq_factor = 1\.0 is not below high_freq_factor",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": None}},
            "high_freq_factor is needed with rope_type = 'llama3'",
        ),
        ({"rope_scaling": {**LLAMA3, "type": "yarn"}}, "rope_type = 'llama3' and type = 'yarn' are both set"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "both set: keep one"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            r"original_max_position_embeddings = 4096 is not rope_scaling\.original_max_.* = 8192",
        ),
        (
            {"rope_scaling": YARN, "max_position_embeddings": 40000},
            r"max_position_embeddings = 40000 is more than rope_scaling\.factor x .* = 32768",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .*'sliding_attention'"),
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
