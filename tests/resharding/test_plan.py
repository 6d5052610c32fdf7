"""Plans of exports, for layouts of any size: what arrives where, how much moves, and how much memory it takes.

No process groups: the buckets of all ranks are moved in one process, as the collectives would.
"""

from collections import Counter

import pytest
import torch
from support.shards import dtypes_of, experts_model, full_weights, shards_of, tiny_model

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.layout import RolloutLayout, WeightLayout
from mindspeed_rl.resharding.names import parameter_table
from mindspeed_rl.resharding.plan import Bucket, ExportPlan, make_plan

BUCKET = 4000
EVERYTHING = RolloutLayout()


def plans_of(model: ModelConfig, layout: WeightLayout, rollout=EVERYTHING, bucket=BUCKET) -> list[ExportPlan]:
    return [make_plan(model, dtypes_of(model), layout, rank, bucket, rollout) for rank in range(layout.world)]


def move(buckets: dict[int, Bucket], local: dict[int, dict[str, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Carry out one bucket of all ranks that exchange anything; what each has received."""
    mine = {}
    for rank, bucket in buckets.items():
        mine[rank] = torch.full((bucket.send_bytes,), 0xAA, dtype=torch.uint8)
        for piece in bucket.sent:
            rows = local[rank][piece.parameter.name].detach()[piece.rows.start : piece.rows.stop]
            piece.views(mine[rank])[0].copy_(rows)
    for step in range(len(next(iter(buckets.values())).collectives)):
        before, gathered = dict(mine), {}
        for rank, bucket in buckets.items():
            collective = bucket.collectives[step]
            me = collective.ranks.index(rank)
            received = []
            for other, arriving in zip(collective.ranks, collective.receives, strict=True):
                theirs = buckets[other].collectives[step]
                assert (theirs.way, theirs.ranks) == (collective.way, collective.ranks)
                assert theirs.sends[me] == arriving  # both ends agree
                start = sum(theirs.sends[:me]) if collective.way == "all_to_all" else 0
                received.append(before[other][start : start + arriving])
            gathered[rank] = torch.cat(received)
            assert len(gathered[rank]) == (bucket.receive_bytes if collective.way != "broadcast" else len(mine[rank]))
        mine = gathered
    return mine


LAYOUTS = [
    (WeightLayout.even(tiny_model(), tp=2), EVERYTHING),
    (WeightLayout(2, ((range(0, 1), range(2, 3)), (range(1, 2),)), dp=2), EVERYTHING),
    (WeightLayout.even(experts_model(), pp=3, dp=4, ep=4), EVERYTHING),
    (WeightLayout.even(experts_model(), tp=2, pp=3, dp=4, ep=2), EVERYTHING),
    (WeightLayout.even(experts_model(), dp=2, ep=2), RolloutLayout(2, True)),
    (WeightLayout.even(experts_model(), dp=8), RolloutLayout(8, True)),
    (WeightLayout.even(experts_model(), tp=2, dp=4, ep=4), RolloutLayout(4, True)),
    (WeightLayout.even(experts_model(), tp=2, pp=3, dp=8, ep=4), RolloutLayout(8, True)),
    (WeightLayout.even(experts_model(), dp=6, ep=2), RolloutLayout(3, True)),  # 3, 3 and 2 experts
]


@pytest.mark.parametrize(
    ("layout", "rollout"), LAYOUTS, ids=lambda x: f"tp{x.tp}pp{x.pp}dp{x.dp}ep{x.ep}" if hasattr(x, "pp") else str(x)
)
def test_every_rank_gets_what_it_needs_once(layout: WeightLayout, rollout: RolloutLayout) -> None:
    model = experts_model() if layout.ep > 1 or rollout.expert_parallel else tiny_model()
    weights, plans = full_weights(model), plans_of(model, layout, rollout)
    local = {rank: shards_of(weights, model, layout, rank) for rank in range(layout.world)}
    arrived: dict[int, Counter] = {
        plan.rank: Counter({parameter.name: parameter.local_shape(layout.tp)[0] for parameter in plan.local})
        for plan in plans
    }
    replicas = [
        [rank for rank in range(layout.world) if layout.coordinates(rank)[2] // layout.ep == number]
        for number in range(layout.dp // layout.ep)
    ]
    for ranks in replicas:
        (count,) = {len(plans[rank].buckets) for rank in ranks}
        for number in range(count):
            for rank, flat in move({rank: plans[rank].buckets[number] for rank in ranks}, local).items():
                for piece in plans[rank].buckets[number].received:
                    parameter = piece.parameter
                    assert arrived[rank][parameter.name] == piece.rows.start  # in order, nothing twice
                    arrived[rank][parameter.name] = piece.rows.stop
                    full = parameter.from_hf([weights[name] for name in parameter.hf_names])
                    for tp_rank, rows in enumerate(piece.views(flat)):
                        shard = parameter.shard(full, tp_rank, layout.tp)
                        assert torch.equal(rows, shard[piece.rows.start : piece.rows.stop]), parameter.name
    for rank, found in arrived.items():
        needed = [p for p in parameter_table(model) if p.expert is None or p.expert in rollout.experts(model, rank)]
        assert found == {p.name: p.local_shape(layout.tp)[0] for p in needed}
        assert sorted(plans[rank].hf_names) == sorted(name for p in needed for name in p.hf_names)
        assert set(plans[rank].hf_names) == rollout.hf_names(model, rank)
    assert sum(plan.sent_bytes for plan in plans) == sum(plan.received_bytes for plan in plans)


def test_experts_go_only_where_they_are_needed() -> None:
    """Eight experts, on two training ranks each, for four rollout ranks that keep two each."""
    model = experts_model(moe_ffn_hidden_size=32)
    layout, rollout = WeightLayout.even(model, dp=4, ep=2), RolloutLayout(4, True)
    per_expert = 3 * 32 * 16 * 2  # gate, up and down in bfloat16
    needed_from_others = []
    for plan in plans_of(model, layout, rollout):
        held = layout.experts(model, layout.expert_rank(layout.coordinates(plan.rank)[2]))
        needed_from_others.append(len(set(rollout.experts(model, plan.rank)) - set(held)))
        assert plan.received_bytes == needed_from_others[-1] * per_expert * model.num_moe_layers
    assert needed_from_others == [0, 2, 2, 0]  # rank 0 trains 0-3 and keeps 0-1; rank 1 trains 4-7 and keeps 2-3; …
    everything = plans_of(model, layout)
    assert all(plan.received_bytes == 4 * per_expert * model.num_moe_layers for plan in everything)


def test_nothing_moves_where_ranks_have_what_they_need() -> None:
    model = experts_model()
    for plan in plans_of(model, WeightLayout.even(model, dp=4, ep=2), RolloutLayout(2, True)):
        assert not plan.buckets
        assert plan.peak_bytes == max(plan.hf_bytes(p) for p in plan.local if p.transform == "qkv")
    (plan,) = plans_of(tiny_model(), WeightLayout.even(tiny_model()))
    assert (plan.buckets, plan.sent_bytes, plan.received_bytes) == ((), 0, 0)


def test_layouts_of_vllm() -> None:
    """The linear placement that vLLM's own function gives."""
    model = experts_model()
    for tp in (1, 2, 3, 4, 8):
        places = [RolloutLayout(tp, True).experts(model, rank) for rank in range(tp)]
        assert [expert for place in places for expert in place] == list(range(8))
        assert max(map(len, places)) - min(map(len, places)) <= 1
        assert sorted(places, key=len, reverse=True) == places
        assert RolloutLayout(tp, True).experts(model, tp) == places[0]  # the next engine
        assert RolloutLayout(tp).experts(model, 1) == range(8)


@pytest.mark.parametrize("bucket", [200, 1000, 10**6])
@pytest.mark.parametrize(("layout", "rollout"), [LAYOUTS[1], LAYOUTS[3], LAYOUTS[7]], ids=["dense", "gather", "own"])
def test_buckets_are_bounded_and_full(layout: WeightLayout, rollout: RolloutLayout, bucket: int) -> None:
    model = experts_model() if layout.ep > 1 else tiny_model()
    for plan in plans_of(model, layout, rollout, bucket):
        for each in plan.buckets:
            rows = {(piece.parameter.name, piece.rows) for piece in (*each.sent, *each.received)}
            assert each.nbytes <= bucket or all(len(rows) == 1 for _, rows in rows)
        experts = layout.ep * max(
            (plan.hf_bytes(p) for p in parameter_table(model) if p.expert is not None), default=0
        )
        largest = max(experts, *map(plan.hf_bytes, parameter_table(model)))
        assert plan.peak_bytes <= 2 * max(each.nbytes for each in plan.buckets) + largest
        assert len(plan.buffer_bytes) == min(2, len(plan.buckets))
    assert (len(plan.buckets) > 100) == (bucket == 200)


def test_a_tensor_larger_than_a_bucket_travels_in_pieces() -> None:
    model = tiny_model(vocab_size=4000)
    (plan, _) = plans_of(model, WeightLayout.even(model, tp=2), bucket=9600)
    pieces = [piece for bucket in plan.buckets for piece in bucket.received]
    assert sum("embedding" in piece.parameter.name for piece in pieces) > 10
    # beside the whole tensor, which vLLM's loader takes, no more than two buckets
    assert plan.peak_bytes <= 2 * 9600 + 4000 * 16 * 2


def test_plans_can_be_read() -> None:
    model = experts_model()
    layout, rollout = WeightLayout.even(model, tp=2, dp=4, ep=2), RolloutLayout(4, True)
    text = str(make_plan(model, dtypes_of(model), layout, 5, 1 << 20, rollout))
    assert text.splitlines()[0] == "rank 5 of 8 (TP 1/2, PP 0/1, replica 2/4, EP 2)"
    assert "all_gather over ranks 4, 5" in text
    assert "all_to_all over ranks 4, 5, 6, 7" in text
    assert "sends" in text
    assert "extra memory" in text
