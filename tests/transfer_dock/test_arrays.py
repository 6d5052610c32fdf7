"""Row numbers as arrays."""

import numpy as np
import pytest

from mindspeed_rl.transfer_dock.arrays import Shared, as_index, counted, members


@pytest.mark.parametrize("numbers", [[], [3], [0, 0, 1, 4, 4, 4], [5, 2, 5, 9, 2, 5], list(range(1000)), [7] * 300])
def test_numbers_are_counted_in_the_order_in_which_they_occur(numbers):
    different, counts = counted(np.array(numbers, np.int64))
    assert different.tolist() == list(dict.fromkeys(numbers))
    assert counts.tolist() == [numbers.count(number) for number in different.tolist()]


def test_an_index_means_the_same_whatever_its_kind():
    values = np.arange(5000) * 3
    rng = np.random.default_rng(0)
    cases = [np.arange(100, 1100), np.arange(0), np.array([4]), rng.permutation(5000)[:600]]
    cases.append(np.concatenate((np.arange(300), np.arange(299, 599))))  # ends as if they followed each other
    swapped = np.arange(500)
    swapped[[7, 8]] = swapped[[8, 7]]
    for numbers in [*cases, swapped]:
        assert np.array_equal(values[as_index(numbers)], values[numbers])
    assert isinstance(as_index(cases[0]), slice)


def test_equal_arrays_become_one():
    shared, first = Shared(), np.arange(4)
    assert shared(first) is first
    assert shared(np.arange(4)) is first
    assert shared(np.arange(5)) is not first


def test_members_of_groups():
    assert members([2, 0], 3).tolist() == [6, 7, 8, 0, 1, 2]
    assert members([5], 1).tolist() == [5]
