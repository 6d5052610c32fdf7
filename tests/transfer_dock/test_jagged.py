"""Views of flat memory that behave like a list of tensors."""

import numpy as np
import pytest
import torch

from mindspeed_rl.transfer_dock.jagged import Jagged


def rows(jagged):
    return [row.tolist() for row in jagged]


def test_rows_are_views_in_order():
    flat = torch.arange(6)
    jagged = Jagged(flat, [2, 0, 3, 1])
    assert rows(jagged) == [[0, 1], [], [2, 3, 4], [5]]
    assert [jagged[i].tolist() for i in range(-4, 4)] == rows(jagged) * 2
    assert [row.tolist() for row in jagged[1:3]] == [[], [2, 3, 4]]
    assert jagged.lengths.tolist() == [2, 0, 3, 1]
    assert jagged.values.data_ptr() == flat.data_ptr(), "no copy"
    flat[2] = 9
    assert jagged[2].tolist() == [9, 3, 4]
    with pytest.raises(IndexError):
        jagged[4]


def test_rows_share_pieces():
    jagged = Jagged(torch.arange(5), [2, 3], pieces=[1, 1, 0])
    assert rows(jagged) == [[2, 3, 4], [2, 3, 4], [0, 1]]
    assert jagged.values.tolist() == [2, 3, 4, 2, 3, 4, 0, 1]
    values, lengths, pieces = jagged.distinct()
    assert (values.tolist(), lengths.tolist(), pieces.tolist()) == ([0, 1, 2, 3, 4], [2, 3], [1, 1, 0])
    unused = Jagged(torch.arange(5), [2, 3], pieces=[1, 1])
    assert unused.distinct()[0].tolist() == [2, 3, 4, 2, 3, 4], "pieces that no row is are left out"


def test_rows_of_several_flat_tensors_are_joined():
    bounds = np.array([0, 1, 3])
    jagged = Jagged.joined(
        [(torch.arange(3), bounds, np.array([1])), (torch.arange(10, 13), bounds, np.array([0, 1, 0]))]
    )
    assert rows(jagged) == [[1, 2], [10], [11, 12], [10]]
    assert [jagged[i].tolist() for i in range(4)] == rows(jagged)
    assert jagged.lengths.tolist() == [2, 1, 2, 1]
    assert jagged.values.tolist() == [1, 2, 10, 11, 12, 10]
    assert rows(Jagged.joined([])) == []


def test_far_apart_rows_are_cut_out_one_by_one():
    jagged = Jagged(torch.arange(1000), [10] * 100, pieces=[99, 0])
    assert rows(jagged) == [list(range(990, 1000)), list(range(10))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.arange(3), [1, 1]), "adding up to 2"),
        ((torch.zeros(2, 2), [4]), r"shape \(2, 2\)"),
        ((torch.arange(3), [4, -1]), "adding up to 3"),
        ((torch.arange(3), [3], [1]), "pieces from 1 to 1: there are 1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Jagged(*arguments)
