"""The conversion command: bit-exact round trips, and refusals that say why."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cli.convert_checkpoint import main
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import open_checkpoint

torch.set_num_threads(1)
COMMAND = Path(__file__).resolve().parents[2] / "cli" / "convert_checkpoint.py"


def make_model(
    folder: Path, model_type: str, tie: bool = False, dtype: torch.dtype = torch.float32, **further
) -> Path:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        model_type,
        **{"num_key_value_heads": 2, "head_dim": 6, **further},
        vocab_size=41,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def convert(direction, load, save):
    return main(["--direction", direction, "--load", str(load), "--save", str(save)])


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_bit_exact(tmp_path, model_type, tie, dtype):
    source = make_model(tmp_path / "source", model_type, tie, dtype)
    assert convert("hf2mcore", source, tmp_path / "mcore") == 0
    assert open_checkpoint(tmp_path / "mcore").trainer["weights_only"] is True
    shutil.move(source, tmp_path / "gone")  # the checkpoint suffices
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "target") == 0
    expected, found = HFWeights(tmp_path / "gone"), HFWeights(tmp_path / "target")
    assert sorted(found.names) == sorted(expected.names)
    for name in expected.names:
        assert torch.equal(found.tensor(name), expected.tensor(name))
        assert found.tensor(name).dtype == expected.tensor(name).dtype
    for file in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "target" / file).read_bytes() == (tmp_path / "gone" / file).read_bytes()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("gone", "target")]
    assert configs[0] == configs[1]


def test_round_trip_of_experts_is_bit_exact(tmp_path):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0]}
    source = make_model(tmp_path / "source", "qwen3_moe", **experts)
    assert convert("hf2mcore", source, tmp_path / "mcore") == 0
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "target") == 0
    expected, found = HFWeights(source), HFWeights(tmp_path / "target")
    assert sorted(found.names) == sorted(expected.names)
    assert all(torch.equal(found.tensor(name), expected.tensor(name)) for name in expected.names)


def test_round_trip_of_latent_attention_is_bit_exact(tmp_path):
    latent = {"num_key_value_heads": 4, "head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 10, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2}
    routing = {"topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    source = make_model(tmp_path / "source", "deepseek_v3", **latent, **ranks, **experts, **routing)
    assert convert("hf2mcore", source, tmp_path / "mcore") == 0
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "target") == 0
    expected, found = HFWeights(source), HFWeights(tmp_path / "target")
    assert sorted(found.names) == sorted(expected.names)
    assert all(torch.equal(found.tensor(name), expected.tensor(name)) for name in expected.names)
    # a layer for a further token, which transformers' file announces, is in neither
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "target")]
    assert [config.pop("num_nextn_predict_layers") for config in configs] == [1, 0]
    assert configs[0] == configs[1]


def test_converted_model_computes_the_same(tmp_path):
    source = make_model(tmp_path / "source", "qwen2")
    convert("hf2mcore", source, tmp_path / "mcore")
    convert("mcore2hf", tmp_path / "mcore" / "iter_0000000", tmp_path / "target")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, tmp_path / "target")
        ]
    assert torch.equal(*logits)


def test_refusals_name_the_cause(tmp_path, capsys):
    source = make_model(tmp_path / "source", "llama")

    def refused(*arguments):
        assert convert(*arguments) == 1
        assert not (tmp_path / "new").exists()
        return capsys.readouterr().err

    new = tmp_path / "new"
    assert "nowhere does not exist" in refused("hf2mcore", tmp_path / "nowhere", new)
    assert "source exists already" in refused("hf2mcore", source, source)
    assert "neither a checkpoint nor" in refused("mcore2hf", source, new)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    assert "config.json: hidden_act = 'gelu'" in refused("hf2mcore", source, new)
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 24}))
    assert "gate_proj.weight has shape (20, 16), expected (24, 16)" in refused("hf2mcore", source, new)
    (source / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    save_file({**weights, "model.layers.0.extra": torch.zeros(1)}, source / "model.safetensors")
    assert "has unexpected 1 tensors: model.layers.0.extra" in refused("hf2mcore", source, new)
    del weights["model.norm.weight"]
    save_file(weights, source / "model.safetensors")
    assert "lacks 1 tensors: model.norm.weight" in refused("hf2mcore", source, new)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-10])
    assert "model.safetensors is truncated or corrupt" in refused("hf2mcore", source, new)


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    convert("hf2mcore", make_model(tmp_path / "source", "qwen2"), tmp_path / "mcore")
    file = tmp_path / "mcore" / "iter_0000000" / "tensors" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "target") == 1
    assert "__0_0.distcp is corrupt" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    source = make_model(tmp_path / "source", "llama")
    (tmp_path / "file").touch()
    capsys.readouterr()  # saving the model prints its progress
    assert convert("hf2mcore", source, tmp_path / "file" / "new") == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error
    assert error.count("\n") == 1


def test_command_line(tmp_path):
    result = subprocess.run(
        [sys.executable, COMMAND, "--direction", "mcore2hf", "--load", tmp_path, "--save", tmp_path / "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.strip().startswith(f"{tmp_path} is neither a checkpoint")
    with pytest.raises(SystemExit):
        main(["--direction", "hf2mcore", "--load", "a", "--save", "b", "--tensor-parallel", "2"])
