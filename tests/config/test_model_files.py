"""The model's shape: a preset, the checkpoint's config.json, and the two against each other."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.model import ModelConfig

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = "grpo_trainer_tiny_cpu"
PRESET = ModelConfig(**OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / "tiny_qwen2.yaml"))["tiny_qwen2"])
HF = {
    "architectures": [PRESET.architecture],
    "num_hidden_layers": PRESET.num_layers,
    "hidden_size": PRESET.hidden_size,
    "intermediate_size": PRESET.ffn_hidden_size,
    "num_attention_heads": PRESET.num_attention_heads,
    "num_key_value_heads": PRESET.num_query_groups,
    "head_dim": PRESET.kv_channels,
    "vocab_size": PRESET.vocab_size,
    "max_position_embeddings": PRESET.max_position_embeddings,
    "rms_norm_eps": PRESET.norm_epsilon,
    "rope_theta": PRESET.rotary_base,
    "tie_word_embeddings": not PRESET.untie_embeddings_and_output_weights,
}


def violations_of(*overrides: str) -> list[Violation]:
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, overrides)
    return caught.value.violations


def hf_folder(tmp_path: Path, **changes) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**HF, **changes}))
    return str(tmp_path)


def test_model_auto_reads_the_checkpoint(tmp_path):
    overrides = [f"actor_config.load={hf_folder(tmp_path)}", "actor_config.model=auto"]
    cfg, _ = load_config(TINY, overrides)
    assert resolve_model(cfg) == cfg.model["tiny_qwen2"]


def test_model_auto_reads_the_newest_checkpoint_of_a_run(tmp_path):
    (tmp_path / "latest").write_text("iter_0000012\n")
    folder = tmp_path / "iter_0000012" / "hf"
    folder.mkdir(parents=True)
    hf_folder(folder)
    cfg, _ = load_config(TINY, [f"actor_config.load={tmp_path}", "actor_config.model=auto"])
    assert resolve_model(cfg) == cfg.model["tiny_qwen2"]


def test_preset_that_contradicts_the_checkpoint_names_both_values(tmp_path):
    layers, base = PRESET.num_layers + 1, PRESET.rotary_base * 100
    folder = hf_folder(tmp_path, num_hidden_layers=layers, rope_theta=base)
    found = violations_of(f"actor_config.load={folder}")
    assert [(v.path, v.value) for v in found] == [
        ("model.tiny_qwen2.num_layers", PRESET.num_layers),
        ("model.tiny_qwen2.rotary_base", PRESET.rotary_base),
    ]
    assert f"num_layers = {layers}" in found[0].message
    assert f"rotary_base = {base}" in found[1].message


def test_preset_may_allow_fewer_positions_than_the_checkpoint(tmp_path):
    more, fewer = PRESET.max_position_embeddings * 2, PRESET.max_position_embeddings - 1
    folder = hf_folder(tmp_path, max_position_embeddings=more)
    load_config(TINY, [f"actor_config.load={folder}"])
    hf_folder(tmp_path, max_position_embeddings=fewer)
    (violation,) = violations_of(f"actor_config.load={folder}")
    assert f"max_position_embeddings = {fewer}" in violation.message


def test_rope_scaling_must_be_that_of_the_checkpoint(tmp_path):
    linear = {"rope_type": "linear", "factor": 2.0}
    overrides = [f"actor_config.load={hf_folder(tmp_path, rope_scaling=linear)}"]
    (violation,) = violations_of(*overrides)
    assert (violation.path, violation.value) == ("model.tiny_qwen2.rope_scaling", None)
    assert "RopeScaling(rope_type='linear', factor=2.0)" in violation.message  # defaults left out
    overrides.append("model.tiny_qwen2.rope_scaling={rope_type: linear, factor: 2}")
    load_config(TINY, overrides)


def test_sequences_are_no_longer_than_the_sliding_window(tmp_path):
    overrides = [
        f"actor_config.load={hf_folder(tmp_path, architectures=['MistralForCausalLM'], sliding_window=15)}",
        "actor_config.model=auto",
    ]
    found = violations_of(*overrides)
    assert [(v.path, v.value) for v in found] == [
        ("megatron_training.seq_length", 16),
        ("generate_config.max_model_len", 16),
    ]
    assert all("sliding_window = 15" in v.message for v in found)
    shorter = ["megatron_training.seq_length=15", "generate_config.max_model_len=15"]
    load_config(TINY, [*overrides, *shorter])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "holds a list"),
        (json.dumps({**HF, "architectures": ["MambaForCausalLM"]}), "MambaForCausalLM"),
        (json.dumps({**HF, "rope_scaling": {"rope_type": "longrope"}}), "longrope"),
        (json.dumps({key: value for key, value in HF.items() if key != "vocab_size"}), "vocab_size"),
    ],
)
def test_unreadable_config_json(tmp_path, text, reason):
    (tmp_path / "config.json").write_text(text)
    (violation,) = violations_of(f"actor_config.load={tmp_path}")
    assert violation.path == "actor_config.load"
    assert reason in violation.message


def test_auto_without_checkpoint_names_the_way_out(tmp_path):
    cfg, _ = load_config(TINY, ["actor_config.model=auto", "actor_config.load=nowhere"])
    with pytest.raises(ConfigError, match="name a preset"):
        resolve_model(cfg)
