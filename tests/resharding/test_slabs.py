"""Rectangles of Hugging Face tensors: together they are the whole model, once, whatever the layout."""

from math import prod

import pytest
import torch

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.layout import WeightLayout, equal_part
from mindspeed_rl.resharding.names import parameter_table

SIZES = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 4,
    "vocab_size": 11,  # divides by nothing: padded
    "max_position_embeddings": 16,
    "norm_epsilon": 1e-6,
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 4, "moe_router_topk": 2}


def model(architecture: str) -> ModelConfig:
    experts = EXPERTS if "Moe" in architecture else {}
    traits = {"add_qkv_bias": architecture.startswith("Qwen2"), "qk_layernorm": architecture.startswith("Qwen3")}
    return ModelConfig(architecture=architecture, **SIZES, **experts, **traits)


def numbered(table) -> dict[str, torch.Tensor]:
    """Hugging Face tensors in which no two elements are equal."""
    shapes = [pair for p in table for pair in zip(p.hf_names, p.hf_shapes, strict=True)]
    numbers = torch.arange(float(sum(prod(shape) for _, shape in shapes)))
    parts = numbers.split([prod(shape) for _, shape in shapes])
    return {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("most", [1, 10, 2**62])
def test_slabs_are_where_the_shard_has_them(architecture: str, tp: int, most: int) -> None:
    table = parameter_table(model(architecture))
    tensors = numbered(table)
    generator = torch.Generator().manual_seed(tp)
    for parameter in table:
        full = parameter.from_hf([tensors[name] for name in parameter.hf_names])
        for tp_rank in range(tp):
            shard = parameter.shard(full, tp_rank, tp).reshape(-1)
            start, stop = sorted(torch.randint(len(shard) + 1, (2,), generator=generator).tolist())
            for first, last in ((0, len(shard)), (start, stop)):
                rebuilt = torch.zeros(len(shard))
                for slab in parameter.slabs(tp_rank, tp, first, last, most):
                    size, width = prod(slab.sizes), prod(slab.shape[1:])
                    assert first <= slab.start <= slab.start + size <= last
                    assert size <= max(most, width)
                    here = [slice(o, o + s) for o, s in zip(slab.offsets, slab.sizes, strict=True)]
                    assert slab.shape == tuple(tensors[slab.name].shape)
                    assert not rebuilt[slab.start : slab.start + size].any()
                    rebuilt[slab.start : slab.start + size] = tensors[slab.name][tuple(here)].reshape(-1)
                expected = torch.zeros(len(shard))
                expected[first:last] = shard[first:last]
                assert torch.equal(rebuilt, expected), parameter.name  # the padding is zeros in both


def test_a_part_of_a_parameter_is_few_slabs() -> None:
    (parameter,) = (
        p for p in parameter_table(model("Qwen2ForCausalLM")) if p.name.endswith("1.mlp.linear_fc2.weight")
    )
    slabs = list(parameter.slabs(1, 2, 4, 23))  # [8, 12] of which this rank has columns 6 to 12
    assert [(slab.offsets, slab.sizes) for slab in slabs] == [((0, 10), (1, 2)), ((1, 6), (2, 6)), ((3, 6), (1, 5))]
    assert [slab.start for slab in slabs] == [4, 6, 18]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_equal_parts_cover_everything_once(parts: int) -> None:
    sizes = [5, 1, 0, 17, 3]
    found = [equal_part(sizes, part, parts) for part in range(parts)]
    for number, size in enumerate(sizes):
        assert all(0 <= ranges[number].start <= ranges[number].stop <= size for ranges in found)
        assert [index for ranges in found for index in ranges[number]] == list(range(size))
    shares = [sum(len(indices) for indices in ranges) for ranges in found]
    assert max(shares) - min(shares) <= 1


LAYOUTS = [
    (1, 1, 1, 1),
    (2, 1, 3, 1),
    (1, 2, 4, 2),
    (2, 2, 4, 4),
]


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize(("tp", "pp", "dp", "ep"), LAYOUTS)
def test_all_ranks_write_everything_once_and_equally_much(
    architecture: str, tp: int, pp: int, dp: int, ep: int
) -> None:
    config = model(architecture)
    ep = ep if config.num_moe_experts else 1
    layout = WeightLayout.even(config, tp, pp, dp, ep)
    written = {name: torch.zeros_like(tensor) for name, tensor in numbered(parameter_table(config)).items()}
    elements = [0] * layout.world
    for rank in range(layout.world):
        tp_rank, pp_rank, replica = layout.coordinates(rank)
        owned = layout.owned(config, pp_rank, layout.expert_rank(replica))
        for name, share in layout.written(config, rank).items():
            for slab in owned[name].slabs(tp_rank, tp, share.start, share.stop):
                here = [slice(o, o + s) for o, s in zip(slab.offsets, slab.sizes, strict=True)]
                written[slab.name][tuple(here)] += 1
            elements[rank] += len(share)
    assert all((counts == 1).all() for counts in written.values())
    for stage in range(pp):
        for tp_rank in range(tp):
            of_replicas = [elements[layout.rank(tp_rank, stage, replica)] for replica in range(dp)]
            assert max(of_replicas) - min(of_replicas) <= 2  # one for experts, one for all else
