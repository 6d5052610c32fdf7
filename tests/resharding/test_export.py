"""Export through real collectives (gloo): every rank gets its Hugging Face tensors bit for bit, as it was planned."""

import time
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.shards import dtypes_of, experts_model, full_weights, latent_model, make_groups, shards_of, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.resharding.checksums import differing, training_checksums, with_checksums
from mindspeed_rl.resharding.export import Groups, check_parameters, export_hf
from mindspeed_rl.resharding.layout import RolloutLayout, WeightLayout
from mindspeed_rl.resharding.plan import make_plan

torch.set_num_threads(1)
BUCKET = 4000
EVERYTHING = RolloutLayout()
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Traffic:
    """Counts what really goes over the groups: collectives, and bytes that leave and reach this rank."""

    def __init__(self, rank: int):
        self.rank = rank
        self.calls: Counter = Counter()
        self.sent = self.received = 0
        for name in ("broadcast", ALL_GATHER, "all_to_all_single"):
            setattr(
                dist,
                name,
                self._counted(getattr(dist, name), getattr(self, f"_{name.replace('_into_tensor', '_single')}")),
            )

    def _counted(self, original, count):
        def collective(*args, **kwargs):
            self.calls[original.__name__] += 1
            count(*args, **kwargs)
            return original(*args, **kwargs)

        return collective

    def _broadcast(self, tensor, source, group, async_op):
        if source == self.rank:
            self.sent += tensor.nbytes * (group.size() - 1)
        else:
            self.received += tensor.nbytes

    def _all_gather_single(self, output, mine, group, async_op):
        self.sent += mine.nbytes * (group.size() - 1)
        self.received += output.nbytes - mine.nbytes

    def _all_to_all_single(self, output, mine, received, sent, group, async_op):
        me = dist.get_group_rank(group, self.rank)
        self.sent += sum(sent) - sent[me]
        self.received += sum(received) - received[me]


class Memory(TorchDispatchMode):
    """Bytes of all storages that came to be inside, and are alive."""

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self.seen.discard(key)
        self.now -= size


def export_and_compare(rank, cases):
    traffic = Traffic(rank)
    for layout, rollout, model in cases:
        groups = make_groups(layout, rank)
        weights = full_weights(model)
        local = shards_of(weights, model, layout, rank)
        plan = make_plan(model, dtypes_of(model), layout, rank, BUCKET, rollout)
        needed = rollout.hf_names(model, rank)

        def export(local=local, plan=plan, groups=groups):
            return export_hf(local, plan, groups, CpuDevice())

        # with a consumer that keeps every tensor
        kept = dict(export())
        assert sorted(kept) == sorted(needed)
        for name, tensor in kept.items():
            assert tensor.dtype == weights[name].dtype
            assert not tensor.requires_grad
            assert torch.equal(tensor, weights[name]), name
        # once more, with one that keeps none
        traffic.calls.clear()
        traffic.sent = traffic.received = 0
        with Memory(local.values()) as memory:
            for name, tensor in export():  # noqa: B007
                del tensor
        deadline = time.monotonic() + 5
        while memory.now and time.monotonic() < deadline:
            time.sleep(0.01)  # gloo's threads let go of their buffers a little after the work is done
        collectives = Counter(c.way for bucket in plan.buckets for c in bucket.collectives)
        assert sum(traffic.calls.values()) == sum(collectives.values())
        assert (traffic.sent, traffic.received) == (plan.sent_bytes, plan.received_bytes)
        assert (memory.peak, memory.now) == (plan.peak_bytes, 0)
        check_checksums(local, export, model, layout, rank, groups, needed)


def check_checksums(local, export, model, layout, rank, groups, needed):
    """Shards and what arrived have the same; one bit that is another is found."""
    of_shards = training_checksums(local, model, layout, rank, groups.replica)
    expected = {name: value for name, value in of_shards.items() if name in needed}
    arrived = {}
    for _ in with_checksums(export(), arrived):
        pass
    assert differing(expected, arrived) == []
    victim = sorted(needed)[-1]
    arrived = {}
    for _ in with_checksums(flipped(export(), victim), arrived):
        pass
    assert differing(expected, arrived) == [victim]


def flipped(weights, victim):
    for name, tensor in weights:
        if name == victim:
            tensor = tensor.clone()
            tensor.flatten().view(torch.uint8)[-1] ^= 4
        yield name, tensor


ONE_STAGE = ((range(0, 3),),)
TWO_STAGES = ((range(0, 1),), (range(1, 3),))
INTERLEAVED = ((range(0, 1), range(2, 3)), (range(1, 2),))
TIED = {"untie_embeddings_and_output_weights": False, "vocab_size": 46}


def test_two_ranks():
    own = RolloutLayout(2, True)
    cases = [
        (WeightLayout(2, ONE_STAGE), EVERYTHING, tiny_model()),
        (WeightLayout(1, TWO_STAGES), EVERYTHING, tiny_model(**TIED)),
        (WeightLayout(1, ONE_STAGE, dp=2, ep=2), EVERYTHING, experts_model()),
        (WeightLayout(1, ONE_STAGE, dp=2, ep=2), own, experts_model()),
        (WeightLayout(1, ONE_STAGE, dp=2, ep=2), own, latent_model()),
        (WeightLayout(2, ONE_STAGE), own, experts_model()),
        (WeightLayout(1, TWO_STAGES), own, experts_model()),
    ]
    run_ranks(2, export_and_compare, cases)


def test_four_ranks():
    cases = [
        (WeightLayout(2, INTERLEAVED), EVERYTHING, tiny_model(**TIED)),
        (WeightLayout(2, TWO_STAGES), EVERYTHING, experts_model()),
        (WeightLayout(2, ONE_STAGE, dp=2, ep=2), EVERYTHING, experts_model()),
        (WeightLayout(2, ONE_STAGE, dp=2, ep=2), EVERYTHING, latent_model()),
        (WeightLayout(2, TWO_STAGES), EVERYTHING, latent_model()),
        (WeightLayout(1, INTERLEAVED, dp=2, ep=2), EVERYTHING, experts_model()),
        (WeightLayout(1, ONE_STAGE, dp=4, ep=2), RolloutLayout(4, True), experts_model()),
        (WeightLayout(2, ONE_STAGE, dp=2, ep=2), RolloutLayout(4, True), experts_model()),
        (WeightLayout(1, INTERLEAVED, dp=2, ep=2), RolloutLayout(2, True), experts_model()),
        (WeightLayout(2, TWO_STAGES), RolloutLayout(4, True), experts_model()),
    ]
    run_ranks(4, export_and_compare, cases)


def export_step_by_step(rank):
    traffic = Traffic(rank)
    model, layout = tiny_model(), WeightLayout(2, ONE_STAGE)
    local = shards_of(full_weights(model), model, layout, rank)
    plan = make_plan(model, dtypes_of(model), layout, rank, 2000)
    bucket_of = {
        name: number
        for number, bucket in enumerate(plan.buckets)
        for piece in bucket.received
        for name in piece.parameter.hf_names
    }
    assert len(plan.buckets) > 5
    for name, _ in export_hf(local, plan, make_groups(layout, rank), CpuDevice()):
        under_way = bucket_of.get(name, -1) + 2  # whole tensors come first, while the first bucket is under way
        assert traffic.calls.total() == min(max(1, under_way), len(plan.buckets)), name


def test_the_next_bucket_is_under_way_while_tensors_are_handed_out():
    run_ranks(2, export_step_by_step)


def test_one_rank_copies_no_more_than_the_layout_needs():
    model = tiny_model(architecture="LlamaForCausalLM")
    layout = WeightLayout.even(model)
    weights = full_weights(model)
    local = shards_of(weights, model, layout, 0)
    exported = dict(export_hf(local, make_plan(model, dtypes_of(model), layout, 0, BUCKET), Groups(), CpuDevice()))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    shared = exported["model.layers.0.mlp.up_proj.weight"].untyped_storage().data_ptr()
    assert shared == local["decoder.layers.0.mlp.linear_fc1.weight"].untyped_storage().data_ptr()


def test_parameters_that_do_not_fit_the_plan_are_named():
    model = tiny_model()
    layout = WeightLayout.even(model)
    local = dict(shards_of(full_weights(model), model, layout, 0))
    plan = make_plan(model, dtypes_of(model), layout, 0, BUCKET)
    name = "decoder.final_layernorm.weight"

    def export(changed):
        check_parameters({**local, name: changed}, plan)

    with pytest.raises(CheckpointError, match=r"shape \(3,\), but the name table says \(16,\) at TP size 1"):
        export(local[name][:3])
    with pytest.raises(CheckpointError, match=r"is torch\.bfloat16, but was planned as torch\.float32"):
        export(local[name].bfloat16())
    del local[name]
    with pytest.raises(CheckpointError, match=r"lacks 1 parameters of the name table: decoder\.final_layernorm"):
        check_parameters(local, plan)
