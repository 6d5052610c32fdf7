"""The name table against Hugging Face models, explicit layouts written out by hand, and round trips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import check_hf_names, global_name, parameter_table

torch.set_num_threads(1)


def hf_model(model_type: str, **overrides):
    values = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**values, **overrides}))


def shape_of(model) -> ModelConfig:
    return ModelConfig.from_hf({**model.config.to_dict(), "architectures": [type(model).__name__]})


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("tie", [False, True])
def test_table_covers_exactly_the_weights_of_the_hugging_face_model(model_type, tie):
    model = hf_model(model_type, tie_word_embeddings=tie)
    config = shape_of(model)
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}  # tied weights once
    found = {}
    for parameter in parameter_table(config):
        found.update(zip(parameter.hf_names, parameter.hf_shapes, strict=True))
    assert found == expected
    assert config.num_parameters == sum(value.numel() for value in model.parameters())


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}


@pytest.mark.parametrize("further", [{}, {"mlp_only_layers": [1]}], ids=["all layers", "one dense layer"])
def test_table_covers_exactly_the_stored_weights_of_experts(further, tmp_path):
    """The model in memory has fused experts; what is stored, and what vLLM reads, are experts one by one."""
    model = hf_model("qwen3_moe", **EXPERTS, **further)
    model.save_pretrained(tmp_path)
    reader = HFWeights(tmp_path)
    config = ModelConfig.from_hf(reader.config())
    found = {}
    for parameter in parameter_table(config):
        found.update(zip(parameter.hf_names, parameter.hf_shapes, strict=True))
    assert found == {name: tuple(reader.slice(name).get_shape()) for name in reader.names}
    fused = model.model.layers[2].mlp.experts
    gate_up = make_table(config)["decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight"]
    assert (gate_up.layer, gate_up.expert) == (2, 5)
    assert torch.equal(gate_up.load_shard(reader, 0, 1), fused.gate_up_proj[5])
    down = make_table(config)["decoder.layers.2.mlp.experts.local_experts.5.linear_fc2.weight"]
    assert torch.equal(down.load_shard(reader, 1, 2), fused.down_proj[5][:, 10:])


LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
KINDS = {
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v2 without query latents": {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_table_covers_exactly_the_stored_weights_of_latent_attention(kind, tmp_path):
    model = hf_model(kind.split()[0], **{**LATENT, **KINDS[kind]})
    model.save_pretrained(tmp_path)
    reader = HFWeights(tmp_path)
    config = ModelConfig.from_hf(reader.config())
    table, found = make_table(config), {}
    for parameter in table.values():
        found.update(zip(parameter.hf_names, parameter.hf_shapes, strict=True))
    assert found == {name: tuple(reader.slice(name).get_shape()) for name in reader.names}
    assert config.num_parameters == sum(torch.Size(shape).numel() for shape in found.values())
    attention = model.model.layers[2].self_attn
    # of each head the keys' channels that do not rotate, then the values: the second of two ranks has heads 4 to 7
    key_value = table["decoder.layers.2.self_attention.linear_kv_up_proj.weight"]
    assert torch.equal(key_value.load_shard(reader, 1, 2), attention.kv_b_proj.weight[4 * (4 + 5) :])
    down = table["decoder.layers.2.self_attention.linear_kv_down_proj.weight"]
    assert torch.equal(down.load_shard(reader, 1, 2), attention.kv_a_proj_with_mqa.weight)
    output = table["decoder.layers.2.self_attention.linear_proj.weight"]
    assert torch.equal(output.load_shard(reader, 1, 2), attention.o_proj.weight[:, 4 * 5 :])
    shared = table["decoder.layers.2.mlp.shared_experts.linear_fc1.weight"]
    mlp = model.model.layers[2].mlp.shared_experts
    halves = [weight[20:] for weight in (mlp.gate_proj.weight, mlp.up_proj.weight)]
    assert torch.equal(shared.load_shard(reader, 1, 2), torch.cat(halves))


def test_layers_that_predict_further_tokens_are_left_out_and_fp8_is_refused(tmp_path):
    hf_model("deepseek_v3", **LATENT, **KINDS["deepseek_v3"]).save_pretrained(tmp_path)
    reader = HFWeights(tmp_path)
    config = ModelConfig.from_hf(reader.config())
    further = [name.replace(".layers.3.", ".layers.4.") for name in reader.names if ".layers.3." in name]
    check_hf_names(config, [*reader.names, *further, "model.layers.4.eh_proj.weight"])
    with pytest.raises(CheckpointError, match=r"has unexpected 1 tensors: model\.layers\.3\.eh_proj\.weight"):
        check_hf_names(config, [*reader.names, "model.layers.3.eh_proj.weight"])
    scales = [f"{name}_scale_inv" for name in reader.names if name.endswith("proj.weight")]
    with pytest.raises(
        CheckpointError, match=rf"fp8 weights with {len(scales)} tensors of scales.*to bfloat16 first"
    ):
        check_hf_names(config, [*reader.names, *scales])


def make_table(config):
    return {parameter.name: parameter for parameter in parameter_table(config)}


def test_ranks_share_experts_and_count_them_from_zero():
    config = shape_of(hf_model("qwen3_moe", **EXPERTS, mlp_only_layers=[0]))
    layout = WeightLayout.even(config, pp=2, dp=6, ep=3)
    assert [layout.expert_rank(replica) for replica in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [layout.experts(config, ep_rank) for ep_rank in range(3)] == [range(0, 2), range(2, 4), range(4, 6)]
    owned = [layout.owned(config, 1, ep_rank) for ep_rank in range(3)]
    fc1 = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"
    for ep_rank, of_rank in enumerate(owned):
        of_layer = [name for name in of_rank if name.startswith("decoder.layers.2.") and "experts" in name]
        assert {of_rank[name].expert for name in of_layer} == set(layout.experts(config, ep_rank))
    # a rank counts its experts, and the layers of its part of the model, from zero
    assert global_name(fc1.format(0, 1), 2, 4) == fc1.format(2, 5)
    assert owned[2][fc1.format(2, 5)].hf_names[0] == "model.layers.2.mlp.experts.5.gate_proj.weight"
    names = {name for stage in range(2) for rank in range(3) for name in layout.owned(config, stage, rank)}
    assert names == {parameter.name for parameter in parameter_table(config)}
    assert "decoder.layers.0.mlp.linear_fc1.weight" in layout.owned(config, 0)
    for dp, ep in ((4, 4), (4, 3)):
        with pytest.raises(CheckpointError, match=f"6 experts cannot be divided evenly over {ep} of {dp} replicas"):
            WeightLayout.even(config, dp=dp, ep=ep)


def test_query_groups_are_interleaved_and_cut_by_rank():
    config = shape_of(hf_model("qwen2"))
    parameter = next(p for p in parameter_table(config) if p.name.endswith("layers.1.self_attention.linear_qkv.bias"))
    query = torch.tensor([100.0 * head + i for head in range(8) for i in range(4)])
    key = torch.tensor([1000.0 + 100 * group + i for group in range(4) for i in range(4)])
    value = key + 1000
    expected = []
    for group in range(4):  # two query heads, then the key and the value head they share
        expected += [100.0 * head + i for head in (2 * group, 2 * group + 1) for i in range(4)]
        expected += [1000.0 + 100 * group + i for i in range(4)] + [2000.0 + 100 * group + i for i in range(4)]
    full = parameter.from_hf([query, key, value])
    assert full.tolist() == expected
    assert parameter.shard(full, 1, 2).tolist() == expected[32:]
    assert [name for name, _ in parameter.to_hf(full)] == [
        f"model.layers.1.self_attn.{projection}_proj.bias" for projection in "qkv"
    ]


def test_gate_and_up_are_cut_separately():
    config = shape_of(hf_model("llama"))
    parameter = next(p for p in parameter_table(config) if p.name == "decoder.layers.0.mlp.linear_fc1.weight")
    gate, up = torch.rand(48, 32), torch.rand(48, 32)
    full = parameter.from_hf([gate, up])
    assert torch.equal(full, torch.cat([gate, up]))
    assert torch.equal(parameter.shard(full, 1, 4), torch.cat([gate[12:24], up[12:24]]))


def test_vocabulary_is_padded_with_zeros_and_trimmed():
    config = shape_of(hf_model("llama", vocab_size=5))
    parameter = parameter_table(config)[0]
    full = torch.rand(parameter.shape)
    shards = [parameter.shard(full, rank, 4) for rank in range(4)]
    assert parameter.local_shape(4) == (config.padded_vocab_size(4) // 4, 32) == (2, 32)
    assert torch.equal(torch.cat(shards), torch.cat([full, torch.zeros(3, 32)]))
    assert torch.equal(parameter.unshard(shards), full)


@settings(max_examples=25, deadline=None)
@given(
    tp_size=st.sampled_from([1, 2, 4]),
    heads_per_group=st.integers(1, 3),
    groups=st.sampled_from([4, 8]),
    head_dim=st.sampled_from([2, 6]),
    vocab=st.integers(1, 21),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_unshard_inverts_shard_for_any_shape(tp_size, heads_per_group, groups, head_dim, vocab, dtype):
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=groups * heads_per_group,
        num_query_groups=groups,
        kv_channels=head_dim,
        vocab_size=vocab,
        max_position_embeddings=16,
        add_qkv_bias=True,
        qk_layernorm=True,
    )
    for parameter in parameter_table(config):
        tensors = [torch.randn(shape).to(dtype) for shape in parameter.hf_shapes]
        full = parameter.from_hf(tensors)
        assert tuple(full.shape) == parameter.shape
        shards = [parameter.shard(full, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(shard.shape) for shard in shards} == {parameter.local_shape(tp_size)}
        assert torch.equal(parameter.unshard(shards), full)
        for (name, tensor), expected, hf_name in zip(
            parameter.shards_to_hf(shards), tensors, parameter.hf_names, strict=True
        ):
            assert name == hf_name
            assert torch.equal(tensor, expected)
            assert tensor.dtype == dtype


def test_layer_indices_of_a_stage():
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert global_name(name, 12) == "decoder.layers.13.mlp.linear_fc2.weight"
    assert global_name("decoder.final_layernorm.weight", 12) == "decoder.final_layernorm.weight"


def test_stages_own_every_parameter_once():
    config = shape_of(hf_model("qwen3", tie_word_embeddings=True))
    layout = WeightLayout(1, ((range(0, 1),), (range(1, 4),)))  # uneven
    owned = [layout.owned(config, stage) for stage in range(2)]
    names = [parameter.name for stage in owned for parameter in stage.values()]
    assert sorted(names) == sorted(parameter.name for parameter in parameter_table(config))
    assert "decoder.layers.2.input_layernorm.weight" in owned[1]
    assert owned[1]["decoder.layers.2.input_layernorm.weight"].layer == 2
    extra = set(layout.held(config, 1)) - set(owned[1])
    assert extra == {"output_layer.weight"}
    assert layout.held(config, 1)["output_layer.weight"].hf_names == ("model.embed_tokens.weight",)
    assert layout.held(config, 0).keys() == owned[0].keys()


def test_ranks_of_a_layout():
    layout = WeightLayout(2, ((range(0, 2),), (range(2, 4),)), dp=3)
    assert layout.world == 12
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 6)] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert all(layout.rank(*layout.coordinates(rank)) == rank for rank in range(12))


def test_wrong_sizes_are_named():
    config = shape_of(hf_model("llama"))
    table = {parameter.name: parameter for parameter in parameter_table(config)}
    qkv = table["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(CheckpointError, match=r"linear_qkv.weight: 4 query groups cannot be divided by TP size 8"):
        qkv.local_shape(8)
    with pytest.raises(CheckpointError, match=r"dimension of 48 cannot be divided by TP size 5"):
        table["decoder.layers.0.mlp.linear_fc1.weight"].local_shape(5)
    with pytest.raises(CheckpointError, match=r"k_proj.weight has shape \(8, 32\), but .* \(16, 32\)"):
        qkv.from_hf([torch.rand(32, 32), torch.rand(8, 32), torch.rand(16, 32)])
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 has shape \(3,\), expected \(32, 32\)"):
        qkv.unshard([torch.rand(32, 32), torch.rand(3)])
    with pytest.raises(CheckpointError, match="4 layers cannot be divided evenly over 3 pipeline stages"):
        WeightLayout.even(config, pp=3)


def test_checkpoints_with_missing_or_unexpected_tensors_are_refused():
    model = hf_model("llama", tie_word_embeddings=True)
    config = shape_of(model)
    names = [name for name, _ in model.named_parameters()]
    check_hf_names(config, [*names, "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
    with pytest.raises(CheckpointError, match=r"has unexpected 1 tensors: model\.layers\.0\.self_attn\.q_proj\.bias"):
        check_hf_names(config, [*names, "model.layers.0.self_attn.q_proj.bias"])
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors: model\.embed_tokens\.weight"):
        check_hf_names(config, names[1:])
