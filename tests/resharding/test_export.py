"""Export through real collectives (gloo): every rank gets the Hugging Face tensors bit for bit."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.export import Topology, export_hf, plan_export
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import parameter_table

torch.set_num_threads(1)
BUCKET = 4000


def tiny_model(**overrides) -> ModelConfig:
    values = {
        "architecture": "Qwen2ForCausalLM",
        "num_layers": 3,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 6,
        "vocab_size": 45,
        "max_position_embeddings": 64,
        "add_qkv_bias": True,
        "qk_layernorm": True,
    }
    return ModelConfig(**{**values, **overrides})


def experts_model(**overrides) -> ModelConfig:
    """Eight experts in every layer but the second."""
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_layer_freq": (1, 0, 1)}
    return tiny_model(architecture="Qwen3MoeForCausalLM", **experts, **overrides)


def latent_model(**overrides) -> ModelConfig:
    """Latent attention, and experts with a bias and a shared one in every layer but the first."""
    attention = {
        "num_query_groups": 4,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 5,
        "kv_lora_rank": 8,
        "q_lora_rank": 7,
    }
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_layer_freq": (0, 1, 1)}
    further = {"moe_router_score_function": "sigmoid", "moe_shared_expert_intermediate_size": 12}
    settings = {**attention, **experts, **further, "moe_router_enable_expert_bias": True, **overrides}
    return tiny_model(architecture="DeepseekV3ForCausalLM", add_qkv_bias=False, qk_layernorm=False, **settings)


def full_weights(model):
    """Hugging Face tensors: bfloat16, but layer norms and biases in float32."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for parameter in parameter_table(model):
        dtype = torch.float32 if "norm" in parameter.name or "bias" in parameter.name else torch.bfloat16
        for name, shape in zip(parameter.hf_names, parameter.hf_shapes, strict=True):
            weights[name] = torch.randn(shape, generator=generator).to(dtype)
    return weights


def shards_of(weights, model, layout, tp_rank, pp_rank, ep_rank=0):
    return {
        name: torch.nn.Parameter(
            parameter.shard(
                parameter.from_hf([weights[hf_name] for hf_name in parameter.hf_names]),
                tp_rank,
                layout.tp,
            )
        )
        for name, parameter in layout.held(model, pp_rank, ep_rank).items()
    }


def topology_of(layout, rank):
    tp_rank, pp_rank, replica = layout.coordinates(rank)

    def group(key, size):
        """The group of all ranks that agree with this one in `key`, or None where that is `size` 1."""
        members = {}
        for other in range(layout.world):
            members.setdefault(key(*layout.coordinates(other)), []).append(other)
        groups = {ranks[0]: dist.new_group(ranks) for ranks in members.values() if size > 1}
        return groups.get(members[key(tp_rank, pp_rank, replica)][0])

    return Topology(
        layout,
        tp_rank,
        pp_rank,
        group(lambda tp, pp, replica: (pp, replica), layout.tp),
        group(lambda tp, pp, replica: (tp, replica), layout.pp),
        layout.expert_rank(replica),
        group(lambda tp, pp, replica: (pp, replica // layout.ep), layout.tp * layout.ep),
    )


def export_and_compare(rank, layout, models, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=layout.world)
    topology = topology_of(layout, rank)
    calls = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, broadcast = getattr(dist, name), dist.broadcast
    setattr(dist, name, lambda *args, **kwargs: (calls.append("gather"), gather(*args, **kwargs))[1])
    dist.broadcast = lambda *args, **kwargs: (calls.append("broadcast"), broadcast(*args, **kwargs))[1]
    for model in models:
        weights = full_weights(model)
        local = shards_of(weights, model, layout, topology.tp_rank, topology.pp_rank, topology.ep_rank)
        plan = plan_export(local, model, topology, BUCKET)
        calls.clear()
        # twice with one plan, the second time with a consumer that keeps every tensor
        for exported in (export_hf(local, topology, plan), list(export_hf(local, topology, plan))):
            names = []
            for name, tensor in exported:
                names.append(name)
                assert tensor.dtype == weights[name].dtype
                assert not tensor.requires_grad
                assert torch.equal(tensor, weights[name]), name
            expected = [name for parameter in parameter_table(model) for name in parameter.hf_names]
            # chunks of an interleaved stage come one after the other, experts that ranks share bucket by bucket
            in_order = layout.ep == 1 and all(len(stage) == 1 for stage in layout.stages)
            assert (names if in_order else sorted(names)) == (expected if in_order else sorted(expected))
        of_experts = sum(bucket.is_expert_parallel for bucket in plan)
        assert (of_experts > 0) == (layout.ep > 1)
        assert calls.count("gather") == 2 * (of_experts if layout.tp == 1 else len(plan))
        assert calls.count("broadcast") == (2 * len(plan) if layout.pp > 1 else 0)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "layout",
    [
        WeightLayout(2, ((range(0, 3),),)),
        WeightLayout(1, ((range(0, 1),), (range(1, 3),))),
        WeightLayout(2, ((range(0, 1), range(2, 3)), (range(1, 2),))),
    ],
    ids=["tp2", "pp2", "tp2pp2"],
)
def test_every_rank_gets_every_tensor_bit_for_bit(layout, tmp_path):
    models = [tiny_model(), tiny_model(untie_embeddings_and_output_weights=False, vocab_size=46)]
    mp.spawn(export_and_compare, (layout, models, tmp_path / "rendezvous"), nprocs=layout.world)


@pytest.mark.parametrize(
    "layout",
    [
        WeightLayout(1, ((range(0, 3),),), dp=2, ep=2),
        WeightLayout(1, ((range(0, 3),),), dp=4, ep=2),
        WeightLayout(2, ((range(0, 3),),), dp=2, ep=2),
        WeightLayout(1, ((range(0, 1), range(2, 3)), (range(1, 2),)), dp=2, ep=2),
        WeightLayout(2, ((range(0, 2),), (range(2, 3),))),
    ],
    ids=["ep2", "dp4ep2", "tp2ep2", "pp2ep2", "tp2pp2"],
)
def test_every_rank_gets_every_expert_bit_for_bit(layout, tmp_path):
    models = [experts_model(), latent_model()]
    mp.spawn(export_and_compare, (layout, models, tmp_path / "rendezvous"), nprocs=layout.world)


def test_one_rank_copies_no_more_than_the_layout_needs():
    model = tiny_model(architecture="LlamaForCausalLM")
    layout = WeightLayout.even(model)
    weights = full_weights(model)
    local = shards_of(weights, model, layout, 0, 0)
    topology = Topology(layout)
    exported = dict(export_hf(local, topology, plan_export(local, model, topology, BUCKET)))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    shared = exported["model.layers.0.mlp.up_proj.weight"].untyped_storage().data_ptr()
    assert shared == local["decoder.layers.0.mlp.linear_fc1.weight"].untyped_storage().data_ptr()


def test_buckets_hold_all_shards_within_their_size():
    model = tiny_model()
    layout = WeightLayout.even(model)
    local = shards_of(full_weights(model), model, layout, 0, 0)
    plan = plan_export(local, model, Topology(layout), BUCKET)
    slots = [slot for bucket in plan for slot in bucket.slots]
    assert [parameter for slot in slots for parameter in slot.parameters] == parameter_table(model)
    assert all(bucket.slots[-1].end <= BUCKET for bucket in plan)
    for bucket in plan:
        assert bucket.slots[0].offset == 0
        assert all(before.end <= after.offset for before, after in itertools.pairwise(bucket.slots))
    assert len(plan) < len(slots) / 3
    # smaller than any shard: each has a bucket of its own
    assert len(plan_export(local, model, Topology(layout), 1)) == len(slots)


def test_buckets_of_experts_gather_no_more_than_others():
    model = experts_model()
    layout = WeightLayout.even(model, dp=4, ep=4)
    local = shards_of(full_weights(model), model, layout, 0, 0)
    plan = plan_export(local, model, Topology(layout), BUCKET)
    for bucket in plan:
        gathered = bucket.nbytes * (4 if bucket.is_expert_parallel else 1)
        assert gathered <= BUCKET or len(bucket.slots) == 1
    experts = [parameter.expert for bucket in plan for slot in bucket.slots for parameter in slot.parameters]
    # the first expert of each rank, then the second: up with gate, down; two layers
    assert [expert for expert in experts if expert is not None] == 2 * [*2 * [0, 2, 4, 6, 1, 3, 5, 7]]


def test_parameters_that_do_not_fit_the_table_are_named():
    model = tiny_model()
    layout = WeightLayout.even(model)
    local = dict(shards_of(full_weights(model), model, layout, 0, 0))
    topology = Topology(layout)
    final = local.pop("decoder.final_layernorm.weight")
    with pytest.raises(CheckpointError, match=r"lacks 1 parameters of the name table: decoder\.final_layernorm"):
        plan_export(local, model, topology, BUCKET)
    local["decoder.final_layernorm.weight"] = final[:3]
    with pytest.raises(CheckpointError, match=r"shape \(3,\), but the name table says \(16,\) at TP size 1"):
        plan_export(local, model, topology, BUCKET)
