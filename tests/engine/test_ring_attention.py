"""Ring attention over ranks that share tokens, against dense attention of each sequence, in float64."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from test_device import dense_attention

from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.types import RolloutBatch

HEADS, SIZE = 4, 8
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    kv_heads: int = 2
    value_size: int = SIZE
    scale: float | None = None


def random_lengths(generator: torch.Generator) -> tuple[int, ...]:
    count, longest = (int(torch.randint(1, high, (1,), generator=generator)) for high in (9, 30))
    return tuple(torch.randint(2, longest + 2, (count,), generator=generator).tolist())


CASES = [
    Case((24,)),  # one sequence in all parts
    Case((12, 12)),  # a part's boundary between sequences, or the middle of one
    Case((6, 6, 6, 6), kv_heads=4),
    Case((3, 18, 3), kv_heads=1),  # a sequence over three parts, or all four
    Case((2, 2, 2, 17, 2), kv_heads=2),  # padding at the end
    Case((11, 13), value_size=5),
    Case((5, 19), kv_heads=4, value_size=3, scale=0.7),
    *(Case(random_lengths(torch.Generator().manual_seed(seed))) for seed in range(8)),
]


def attend(rank: int, world: int) -> list[dict[str, Any]]:
    """This rank's part of output and gradients, in every case."""
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.engine import initialize_parallel_state
    from mindspeed_rl.engine.megatron.modules import PackedAttention
    from mindspeed_rl.engine.megatron.packing import Part, pack

    settings: dict[str, Any] = {"context_parallel_size": world, "context_parallel_algo": "megatron_cp_algo"}
    initialize_parallel_state(MegatronConfig(**settings))
    results = []
    for case in CASES:
        prompts = [torch.ones(length - 1, dtype=torch.int64) for length in case.lengths]
        batch = RolloutBatch(prompts, [torch.ones(1, dtype=torch.int64)] * len(prompts))
        packed = pack(batch, device.current(), Part(rank, world))
        tensors, weight = inputs(case, packed.params.starts[-1])
        mine = [tensor.chunk(world)[rank].detach().requires_grad_() for tensor in tensors]
        core = PackedAttention(None, device, case.scale, cp_comm_type="p2p")  # type: ignore[arg-type]
        output = core(*mine, None, packed_seq_params=packed.params)
        gradients = torch.autograd.grad(output, mine, weight.flatten(1).chunk(world)[rank])
        results.append({"output": output.detach(), "gradients": gradients, "starts": packed.params.starts})
    return results


def inputs(case: Case, total: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value of all tokens, and the gradient of the output."""
    generator = torch.Generator().manual_seed(total)
    shapes = [(HEADS, SIZE), (case.kv_heads, SIZE), (case.kv_heads, case.value_size), (HEADS, case.value_size)]
    *tensors, weight = (torch.randn(total, *shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return tensors, weight


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_attention_equals_dense_attention_of_each_sequence(world: int) -> None:
    results = run_ranks(world, attend, world)
    for case, parts in zip(CASES, zip(*results, strict=True), strict=True):
        starts = torch.tensor(parts[0]["starts"])
        assert starts[-1] % world == 0
        assert tuple(starts.diff().tolist()[: len(case.lengths)]) == case.lengths
        (query, key, value), weight = inputs(case, int(starts[-1]))
        if case.scale is not None:
            query = query * case.scale * SIZE**0.5
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        of_each = zip(*(tensor.split(starts.diff().tolist()) for tensor in leaves), strict=True)
        expected = torch.cat([dense_attention(*sequence) for sequence in of_each])
        of_query, of_key, of_value = torch.autograd.grad(expected, leaves, weight)
        if case.scale is not None:
            of_query = of_query * case.scale * SIZE**0.5
        found = torch.cat([part["output"] for part in parts])
        torch.testing.assert_close(found, expected.detach().flatten(1), atol=TOLERANCE, rtol=0)
        for number, wanted in enumerate((of_query, of_key, of_value)):
            gradient = torch.cat([part["gradients"][number] for part in parts])
            torch.testing.assert_close(gradient, wanted, atol=TOLERANCE, rtol=0, msg=lambda m: f"{case}: {m}")  # noqa: B023


def check_parts(rank: int) -> None:
    from mindspeed_rl.engine.megatron.ring_attention import Parts

    for world, case in itertools.product((2, 3, 4), CASES):
        lengths = torch.tensor([*case.lengths, -sum(case.lengths) % world])
        of_part = torch.arange(len(lengths)).repeat_interleave(lengths).chunk(world)
        parts = Parts.of([0, *lengths.cumsum(0).tolist()], world)
        for mine, back in itertools.product(range(world), range(1, world)):
            keys = parts.keys(mine, back)
            if back > mine:
                assert keys == 0
                continue
            pairs = of_part[mine][:, None] == of_part[mine - back]
            assert keys == pairs.any(0).sum(), (world, case)
            assert not keys or (back <= parts.steps and parts.queries(mine) == pairs.any(1).sum())
        assert parts.steps < world
        assert parts.keys(world, 1) == 0


def test_nothing_is_sent_that_is_not_attended_to() -> None:
    """Queries and keys of two parts are those of pairs of tokens of one sequence."""
    run_ranks(1, check_parts)
