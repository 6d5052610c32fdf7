"""Partition and packing against brute force on small cases, and their promises on random ones."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.data import packing
from mindspeed_rl.data.packing import (
    balanced_partition,
    fixed_micro_batches,
    imbalance,
    micro_batches,
    sequence_costs,
)

# largest sum over the optimum's, by sequences a part: Michiels et al. 2003; and 2 - 1/m for m parts
PROVED_RATIO = {1: 1.0, 2: 1.0, 3: 4 / 3, 4: 19 / 12, 5: 103 / 60, 6: 643 / 360}


def largest(costs, parts):
    return max(sum(costs[i] for i in part) for part in parts)


def least_largest_sum(costs, parts):
    """Optimum over all partitions whose sizes differ by one at most: every way to deal sizes out, exhaustively."""
    size, longer = divmod(len(costs), parts)

    def best(indices, sizes):
        if not sizes:
            return 0
        first, *others = indices
        results = []
        for chosen_size in set(sizes):
            left = list(sizes)
            left.remove(chosen_size)
            for rest in itertools.combinations(others, chosen_size - 1):
                mine = costs[first] + sum(costs[i] for i in rest)
                results.append(max(mine, best([i for i in others if i not in rest], left)))
        return min(results)

    return best(range(len(costs)), [size + 1] * longer + [size] * (parts - longer))


def fewest_bins(lengths, cap):
    """Optimum of bin packing by branch and bound."""
    found = len(lengths)

    def place(index, loads):
        nonlocal found
        if len(loads) >= found:
            return
        if index == len(lengths):
            found = len(loads)
            return
        for load in set(loads):
            if load + lengths[index] <= cap:
                rest = list(loads)
                rest.remove(load)
                place(index + 1, [*rest, load + lengths[index]])
        place(index + 1, [*loads, lengths[index]])

    place(0, [])
    return found


def members(parts):
    return sorted(index for part in parts for index in part)


# ---------------------------------------------------------------- shares of equal cost


def test_costs_are_the_model_s_forward_flops():
    cfg, _ = load_config("grpo_trainer_qwen25_7b")
    model = resolve_model(cfg)
    one, two, three = sequence_costs([1000, 2000, 3000], model)
    quadratic = two - 2 * one  # of 1000² tokens, twice
    assert quadratic == 2 * 2 * 28 * 28 * 128 * 1000**2
    assert three == 3 * one + 3 * quadratic
    assert one == 2 * 1000 * (model.num_parameters - 152064 * 3584) + quadratic // 2
    assert sequence_costs([], model) == []


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 4))
@example([5, 5, 5, 5, 5], 2)
@settings(max_examples=300, deadline=None)
def test_partition_is_within_the_proved_ratio_of_the_optimum(costs, parts):
    found = balanced_partition(costs, parts)
    assert members(found) == list(range(len(costs)))
    assert len(found) == parts
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert all(part == sorted(part) for part in found)
    if len(costs) >= parts:
        ratio = min(PROVED_RATIO.get(-(-len(costs) // parts), 2.0), 2 - 1 / parts)
        assert largest(costs, found) <= ratio * least_largest_sum(costs, parts) + 1e-9


def test_partition_by_hand():
    # dealt out as 8|7, 6|5 and 4|-, joined to 7+5+4 | 8+6; exchanging 7 and 8 would not help, 7 and 6 does
    assert balanced_partition([8, 7, 6, 5, 4], 2) == [[2, 3, 4], [0, 1]]
    assert balanced_partition([1, 1, 1, 1], 2) == [[0, 3], [1, 2]]
    assert balanced_partition([3.0, 1.0, 2.0], 2) == [[1, 2], [0]]
    assert balanced_partition([4], 3) == [[0], [], []]
    assert balanced_partition([], 2) == [[], []]


def test_partition_of_many_is_close_to_perfect():
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 0.9, 16384), 16, 8192).astype(int).tolist()
    for parts in (8, 64):
        found = balanced_partition(lengths, parts)
        assert imbalance(lengths, found) < 1.001
        assert {len(part) for part in found} == {16384 // parts}


def test_a_few_long_sequences_among_short_ones_are_made_up_for():
    # dealing out alone leaves 100 in one part and 60 in the other, beside nearly equal rests
    costs = [100, 60, *range(30, 0, -1)]
    assert imbalance(costs, balanced_partition(costs, 2)) < 1.01
    # nothing can make up for one sequence that costs more than a share
    found = balanced_partition([1000, *[1] * 7], 4)
    assert sum(1 for part in found if len(part) == 2) == 4


@pytest.mark.parametrize("parts", [1, 512, 4096, 16384])
def test_work_is_bounded_for_any_number_of_parts(parts, monkeypatch):
    """Counted, not timed: joins of two parts, and pairs of parts that a swap was looked for between."""
    done = Counter()
    for name in ("_union", "_best_swap"):
        plain = getattr(packing, name)
        monkeypatch.setattr(packing, name, lambda *a, _n=name, _f=plain: done.update([_n]) or _f(*a))
    costs = np.random.default_rng(1).integers(1, 10**6, 16384).tolist()
    found = balanced_partition(costs, parts)
    assert done["_union"] <= len(costs)
    assert done["_best_swap"] <= packing._PAIRS_PER_COST * len(costs) + parts
    assert members(found) == list(range(len(costs)))


def test_partition_is_deterministic_under_ties():
    costs = [7, 7, 7, 3, 3, 3, 3, 3, 1, 1, 1, 1] * 4
    assert len({str(balanced_partition(list(costs), 8)) for _ in range(3)}) == 1
    assert balanced_partition([float(c) for c in costs], 8) == balanced_partition(costs, 8)


def test_imbalance_by_hand():
    assert imbalance([1, 2, 3, 6], [[0, 1], [2], [3]]) == 6 / 4
    assert imbalance([2, 2], [[0], [1]]) == 1.0
    assert imbalance([2, 2], [[0, 1], []]) == 2.0


@pytest.mark.parametrize(("costs", "parts"), [([], []), ([0, 0], [[0], [1]]), ([], [[]])])
def test_imbalance_of_nothing_is_refused(costs, parts):
    with pytest.raises(ValueError, match="expected parts, and more than 0"):
        imbalance(costs, parts)


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="parts = 0: expected at least 1"):
        balanced_partition([1, 2], 0)


# ---------------------------------------------------------------- micro-batches under a token cap

CAP = 20


def test_micro_batches_of_fixed_size():
    assert fixed_micro_batches(5, 2) == [[0, 1], [2, 3], [4]]
    assert fixed_micro_batches(2, 4) == [[0, 1]]
    assert fixed_micro_batches(0, 4) == []


short_lists = st.lists(st.integers(1, CAP), min_size=1, max_size=9)


def check(lengths, found, cap):
    assert members(found) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in part) for part in found]
    assert all(found)
    assert max(sums, default=0) <= cap
    assert sums == sorted(sums, reverse=True)
    assert all(part == sorted(part) for part in found)


@given(short_lists)
@settings(max_examples=300, deadline=None)
def test_few_sequences_need_at_most_one_micro_batch_more_than_the_optimum(lengths):
    found = micro_batches(lengths, CAP)
    check(lengths, found, CAP)
    assert len(found) <= fewest_bins(lengths, CAP) + 1


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=300), st.integers(8192, 40000), st.data())
@settings(max_examples=150, deadline=None)
def test_the_cap_holds_and_the_count_is_the_one_asked_for(lengths, cap, data):
    found = micro_batches(lengths, cap)
    check(lengths, found, cap)
    # two half-empty ones would have been joined
    assert len(found) < 2 * sum(lengths) / cap + 1
    wanted = data.draw(st.integers(1, len(lengths)))
    more = micro_batches(lengths, cap, at_least=wanted)
    check(lengths, more, cap)
    assert len(more) == max(len(found), wanted)
    assert micro_batches(list(lengths), cap, at_least=wanted) == more


@given(short_lists, st.data())
@settings(max_examples=300, deadline=None)
def test_any_count_up_to_one_sequence_each_is_possible(lengths, data):
    wanted = data.draw(st.integers(1, len(lengths)))
    found = micro_batches(lengths, CAP, at_least=wanted)
    check(lengths, found, CAP)
    assert len(found) == max(wanted, len(micro_batches(lengths, CAP)))


def test_micro_batches_by_hand():
    assert micro_batches([10, 10, 10, 10], 20) == [[0, 2], [1, 3]]
    assert micro_batches([1, 2, 3, 4], 100) == [[0, 1, 2, 3]]
    assert micro_batches([1, 2, 3, 4], 100, at_least=2) == [[0, 3], [1, 2]]
    assert micro_batches([1, 2, 3, 4], 100, at_least=4) == [[3], [2], [1], [0]]
    assert micro_batches([20, 1], 20) == [[0], [1]]
    assert micro_batches([], 20, at_least=0) == []


def test_dealing_out_that_breaks_the_cap_leaves_the_best_fit():
    # longest first to the shortest gives 6+4+4 and 6+4; only 6+6 and 4+4+4 fit into two of 12
    lengths = [6, 6, 4, 4, 4]
    assert micro_batches(lengths, 12) == [[0, 1], [2, 3, 4]]
    check(lengths, micro_batches(lengths, 12, at_least=4), 12)


def test_uniform_lengths_are_spread_evenly():
    assert {len(part) for part in micro_batches([100] * 24, 1000)} == {8}  # three of 8, not 10, 10 and 4


@pytest.mark.parametrize("lengths", [[3, 21, 4], [3, 0, 4], [3, -1, 4]])
def test_a_sequence_that_cannot_be_is_named(lengths):
    with pytest.raises(ValueError, match=rf"sequence 1 has {lengths[1]} tokens: expected 1 to max_tokens = 20"):
        micro_batches(lengths, 20)


def test_more_micro_batches_than_sequences_are_refused():
    with pytest.raises(ValueError, match="at_least = 3 micro-batches of only 2 sequences"):
        micro_batches([1, 2], 20, at_least=3)
