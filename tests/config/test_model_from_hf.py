"""ModelConfig.from_hf against the configurations transformers writes."""

import json

import pytest
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config

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
