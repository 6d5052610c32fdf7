"""Tokenizers that load and fit, and those that do not; the tiny models that tests build."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.make_tiny_model import TOKENS, make_tiny_model
from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.tokenizer import actor_tokenizer, check_tokenizer, load_tokenizer


def shape(folder) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))


def test_fits(tiny_model_dir):
    check_tokenizer(load_tokenizer(tiny_model_dir), shape(tiny_model_dir))


def test_a_slow_one_is_refused_where_transformers_has_none(tiny_model_dir):
    config = Config(megatron_training={"tokenizer_name_or_path": str(tiny_model_dir), "use_fast_tokenizer": False})
    with pytest.raises(DataError, match=r"use_fast_tokenizer = False: transformers 5.* set it to true"):
        actor_tokenizer(config, "")
    assert actor_tokenizer(Config(megatron_training={}), str(tiny_model_dir)).is_fast


def test_mismatch(tiny_model_dir):
    model = shape(tiny_model_dir).model_copy(update={"vocab_size": 15})
    with pytest.raises(DataError, match=r"tokenizer mismatch.*ids up to 15, the model has vocab_size = 15"):
        check_tokenizer(load_tokenizer(tiny_model_dir), model)


def test_added_tokens_count(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir)
    tokenizer.add_tokens(["new"])
    with pytest.raises(DataError, match="ids up to 16"):
        check_tokenizer(tokenizer, shape(tiny_model_dir))


def test_no_end_of_sequence(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        check_tokenizer(tokenizer, shape(tiny_model_dir))


def test_missing_or_corrupt(tiny_model_dir, tmp_path):
    with pytest.raises(DataError, match=r"tokenizer_name_or_path = '.*none': no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    for content in ("{bad", "{}", "[]"):
        folder = tmp_path / "corrupt"
        shutil.copytree(tiny_model_dir, folder, dirs_exist_ok=True)
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match="cannot be loaded"):
            load_tokenizer(folder)


def test_tiny_tokenizer(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir)
    assert len(tokenizer) == len(TOKENS) == 16
    ids = tokenizer("12+34=")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "12+34="
    seven = tokenizer.convert_tokens_to_ids("7")
    assert tokenizer.decode([seven, tokenizer.eos_token_id], skip_special_tokens=True) == "7"
    assert tokenizer("a 3 ")["input_ids"] == tokenizer("3")["input_ids"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tie", [True, False])
def test_tiny_models(tmp_path, architecture, tie):
    options = {
        "architecture": architecture,
        "tie": tie,
        "vocab": 24,
        "hidden": 64,
        "layers": 1,
        "heads": 8,
        "kv_heads": 4,
    }
    folder = make_tiny_model(tmp_path / "a", **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    config = shape(folder)
    assert config.num_parameters == model.num_parameters()
    assert (config.vocab_size, config.kv_channels, config.untie_embeddings_and_output_weights) == (24, 8, not tie)
    again = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "b", **options))
    assert load_tokenizer(folder)("3+4=")["input_ids"] == [TOKENS.index(token) for token in "3+4="]
    other = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "b", **options, seed=1))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(("options", "expected"), [({"architecture": "gpt"}, "'gpt'"), ({"vocab": 15}, "16 tokens")])
def test_tiny_model_refuses(tmp_path, options, expected):
    with pytest.raises(ValueError, match=expected):
        make_tiny_model(tmp_path / "a", **options)
