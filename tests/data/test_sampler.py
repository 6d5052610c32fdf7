"""The order of prompts: complete epochs, reproducible, resumable at any point."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.data.sampler import PromptSampler

SIZES = st.integers(1, 30)


@settings(deadline=None)  # a busy machine is no failure
@given(size=SIZES, batch=SIZES, seed=st.integers(0, 2**40), shuffle=st.booleans())
def test_every_epoch_is_a_permutation(size, batch, seed, shuffle):
    batches = list(islice(PromptSampler(size, batch, seed, shuffle), 4 * size // batch + 1))
    assert {len(each) for each in batches} == {batch}
    stream = [index for each in batches for index in each]
    for first in range(0, len(stream) - size + 1, size):
        assert sorted(stream[first : first + size]) == list(range(size))


@settings(deadline=None)  # a busy machine is no failure
@given(size=SIZES, batch=SIZES, later_batch=SIZES, seed=st.integers(0, 100), steps=st.integers(0, 20))
def test_resume_equals_going_on(size, batch, later_batch, seed, steps):
    sampler = PromptSampler(size, batch, seed)
    list(islice(sampler, steps))
    resumed = PromptSampler(size, later_batch, seed)
    resumed.load_state_dict(sampler.state_dict())
    sampler.batch = later_batch
    assert resumed.epoch == sampler.epoch
    assert list(islice(resumed, 10)) == list(islice(sampler, 10))


def test_order_depends_on_seed_and_epoch_only():
    def epochs(seed):
        return list(islice(PromptSampler(50, 50, seed), 3))

    assert epochs(1) == epochs(1)
    assert len({tuple(order) for order in [*epochs(1), *epochs(2)]}) == 6
    assert [i for b in islice(PromptSampler(50, 25, 1), 6) for i in b] == [i for order in epochs(1) for i in order]


def test_order_never_changes():
    """Written down once: a checkpoint of today resumes the same way under later versions of NumPy."""
    assert next(PromptSampler(10, 10, seed=1234)) == [2, 9, 8, 1, 7, 0, 4, 3, 5, 6]


def test_without_shuffle():
    sampler = PromptSampler(3, 2, 0, shuffle=False)
    assert list(islice(sampler, 3)) == [[0, 1], [2, 0], [1, 2]]
    assert sampler.epoch == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"size": 6}, "size was 5 and is 6"), ({"seed": 1}, "seed was 0"), ({"shuffle": False}, "shuffle was True")],
)
def test_resume_of_something_else(change, expected):
    state = PromptSampler(5, 2, 0).state_dict()
    other = PromptSampler(**{"size": 5, "batch": 2, "seed": 0, **change})
    with pytest.raises(DataError, match=expected):
        other.load_state_dict(state)


@pytest.mark.parametrize(("size", "batch"), [(0, 1), (1, 0)])
def test_nothing_to_sample(size, batch):
    with pytest.raises(DataError, match="= 0: must be at least 1"):
        PromptSampler(size, batch, 0)
