"""The order of prompts: complete epochs, reproducible, resumable at any point."""

import pickle
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.common.errors import ConfigError, DataError
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.data.sampler import MixedSampler, PromptSampler, Sampler, make_sampler

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


SOURCES = ["b", "a", "b", "c", "b", "a"]


def mixed(seed: int = 3, shuffle: bool = True, **weights: float) -> MixedSampler:
    return MixedSampler(SOURCES, weights, seed, shuffle)


def test_sources_have_their_shares_in_every_stretch() -> None:
    taken = [SOURCES[index] for index in mixed(a=2, b=1).take(300)]
    assert Counter(taken) == {"a": 200, "b": 100}  # c has no weight
    for start in range(0, 290, 7):
        assert abs(taken[start : start + 9].count("a") - 6) <= 1
    thirds = [SOURCES[index] for index in mixed(a=0.2, b=0.5, c=0.3).take(1000)]
    assert Counter(thirds) == {"a": 200, "b": 500, "c": 300}


def test_rows_of_a_source_come_once_an_epoch_of_it() -> None:
    indices = [index for index in mixed(a=1, b=1).take(24) if SOURCES[index] == "b"]
    assert [sorted(indices[start : start + 3]) for start in (0, 3, 6, 9)] == [[0, 2, 4]] * 4
    assert mixed(shuffle=False, b=1).take(4) == [0, 2, 4, 0]


def test_a_mixture_goes_on_from_its_state() -> None:
    whole, first = mixed(a=2, b=1, c=0.5), mixed(a=2, b=1, c=0.5)
    expected = whole.take(40)[17:]
    first.take(17)
    second = mixed(a=2, b=1, c=0.5)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert second.take(23) == expected
    with pytest.raises(DataError, match="data_source_weights gave"):
        mixed(a=1, b=1, c=1).load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="seed was 3 and is 4"):
        mixed(4, a=2, b=1, c=0.5).load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="size was None"):
        PromptSampler(6, 2, 3).load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match=r"data_source_weights.bb = 1.*did you mean b\?"):
        mixed(bb=1)


BACKWARDS = """
class Sampler:
    def __init__(self, sources, config):
        self.rows, self.used, self.step = len(sources), 0, config.global_batch_size
    def take(self, count):
        self.used += count
        return [(-1 - self.used + i) % self.rows for i in range(count)]
    def state_dict(self):
        return {"used": self.used}
    def load_state_dict(self, state):
        self.used = state["used"]

class Wrong(Sampler):
    def take(self, count):
        return [self.rows] * count

class Broken(Sampler):
    def take(self, count):
        return 1 / 0
"""


def custom(tmp_path: Path, name: str = "Sampler") -> Sampler:
    (tmp_path / "mine.py").write_text(BACKWARDS)
    keys = {"custom_sampler": {"path": str(tmp_path / "mine.py"), "name": name}}
    return make_sampler(MegatronConfig(**keys), SOURCES)


def test_a_sampler_of_ones_own(tmp_path: Path) -> None:
    first, second = custom(tmp_path), custom(tmp_path)
    taken = first.take(2) + first.take(2)
    state = first.state_dict()
    following = first.take(2)
    second.load_state_dict(state)
    assert taken == [3, 4, 1, 2]
    assert second.take(2) == following
    with pytest.raises(DataError, match=r"Wrong.take\(2\) must give 2 row numbers below 6, gave \[6, 6\]"):
        custom(tmp_path, "Wrong").take(2)
    with pytest.raises(DataError, match=r"Broken.take raised ZeroDivisionError"):
        custom(tmp_path, "Broken").take(2)
    with pytest.raises(ConfigError, match="is no class in"):
        custom(tmp_path, "Missing")
    with pytest.raises(DataError, match="had no custom_sampler"):
        first.load_state_dict(PromptSampler(6, 2, 3).state_dict())


def test_the_configuration_chooses() -> None:
    assert isinstance(make_sampler(MegatronConfig(), SOURCES), PromptSampler)
    assert isinstance(make_sampler(MegatronConfig(data_source_weights={"a": 1}), SOURCES), MixedSampler)
