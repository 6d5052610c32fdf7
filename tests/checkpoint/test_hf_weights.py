"""Reading and writing Hugging Face folders, checked with transformers."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mindspeed_rl.checkpoint.hf import HFWeights, write_hf
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.names import parameter_table

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Hugging Face folder with weights in several files, and a tokenizer file."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="4KB")
    (folder / "tokenizer.json").write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def state_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def tensors_of(folder):
    reader = HFWeights(folder)
    return [(name, reader.tensor(name)) for name in reader.names]


@pytest.mark.parametrize("max_shard_bytes", [3000, 2**30])
def test_written_folder_loads_in_transformers_with_the_same_weights(source, tmp_path, max_shard_bytes):
    target = tmp_path / "new" / "model"
    write_hf(target, iter(tensors_of(source)), source, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files == ["model.safetensors"] or files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert (len(files) > 1) == (max_shard_bytes == 3000)
    expected, found = state_of(source), state_of(target)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (target / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert dict(tensors_of(target)).keys() == expected.keys()


def test_written_dtype_is_the_one_transformers_loads(source, tmp_path):
    write_hf(tmp_path / "half", tensors_of(source), source, dtype=torch.bfloat16)
    expected = state_of(source)
    found = state_of(tmp_path / "half")
    assert all(found[name].dtype == torch.bfloat16 for name in found)
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)


def test_a_failed_write_leaves_nothing(source, tmp_path):
    def failing():
        yield from tensors_of(source)[:3]
        raise RuntimeError("out of tensors")

    with pytest.raises(RuntimeError, match="out of tensors"):
        write_hf(tmp_path / "model", failing(), source, max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(source, tmp_path):
    (tmp_path / "keep.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already"):
        write_hf(tmp_path, tensors_of(source), source)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        write_hf(tmp_path / "model", tensors_of(source), tmp_path)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_shards_read_in_slices_equal_shards_of_the_whole(source, tp_size):
    reader = HFWeights(source)
    model = ModelConfig.from_hf(reader.config())
    for parameter in parameter_table(model):
        full = parameter.from_hf([reader.tensor(name) for name in parameter.hf_names])
        for rank in range(tp_size):
            assert torch.equal(parameter.load_shard(reader, rank, tp_size), parameter.shard(full, rank, tp_size))


def test_a_rank_with_nothing_but_padding_loads_zeros(tmp_path):
    from safetensors.torch import save_file

    save_file({"model.embed_tokens.weight": torch.ones(5, 16)}, tmp_path / "model.safetensors")
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=16,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=4,
        vocab_size=5,
        max_position_embeddings=8,
    )
    embedding = parameter_table(model)[0]
    shards = [embedding.load_shard(HFWeights(tmp_path), rank, 4) for rank in range(4)]
    assert [shard.sum().item() for shard in shards] == [32, 32, 16, 0]
    assert {tuple(shard.shape) for shard in shards} == {(2, 16)}


def test_missing_and_damaged_files_are_named(source, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        HFWeights(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        HFWeights(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated or corrupt"):
        HFWeights(folder)
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated or corrupt"):
        HFWeights(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing"):
        HFWeights(folder)
    shard.write_bytes(content)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "lost": shard.name}}))
    with pytest.raises(CheckpointError, match=rf"{shard.name} lacks lost"):
        HFWeights(folder)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json is corrupt"):
        HFWeights(folder)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="no weight_map"):
        HFWeights(folder)


def test_missing_tensors_and_wrong_shapes_are_named(source):
    reader = HFWeights(source)
    with pytest.raises(CheckpointError, match="lacks 2 tensors: a, b"):
        reader.require(["a", "model.norm.weight", "b"])
    with pytest.raises(CheckpointError, match="lacks 1 tensors: a"):
        reader.slice("a")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(16,\), expected \(17,\)"):
        reader.tensor("model.norm.weight", (17,))
