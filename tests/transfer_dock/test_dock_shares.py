"""Shares of equal cost, and how old a policy may be."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.common.errors import DockError, DockTimeout
from mindspeed_rl.transfer_dock.arrays import as_rows
from mindspeed_rl.transfer_dock.spec import NOT_YET, ColumnSpec, ConsumerSpec, DockSpec
from mindspeed_rl.transfer_dock.table import DockTable


def longest_first(lengths, parts):
    """Equally many indices for each part, dealt out from the longest on, back and forth."""
    order = np.argsort(-lengths, kind="stable").reshape(-1, parts)
    order[1::2] = order[1::2, ::-1]
    return [sorted(column.tolist()) for column in order.T]


def make_spec(shares, partition=longest_first, **changes):
    columns = {"seed": ColumnSpec("int64", "scalar"), "x": ColumnSpec("int64"), "y": ColumnSpec("float32")}
    train = {"needs": ("x", "y"), "shares": shares, "balance": ("x", "y")} | changes.pop("train", {})
    consumers = {"make": ConsumerSpec(("seed",), puts=("x",)), "train": ConsumerSpec(**train)}
    return DockSpec(columns, consumers, partition=partition, **changes)


def put(table, rows, column, lengths):
    return table.put(0, as_rows(rows), [column], "payload", 8, {column: np.asarray(lengths)})


def take_all(table, shares, count, done=None):
    """Rows of every share, block by block, claimed and acknowledged."""
    done = done or [[] for _ in range(shares)]
    for share in range(shares):
        while (claim := table.claim("train", 0, count, share)) is not None:
            assert claim is not NOT_YET
            done[share] += claim.rows
            table.ack(0, claim.lease)
    return done


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_block_is_dealt_out_whole_by_its_lengths_in_whatever_order_they_come(data):
    draw = data.draw
    shares, blocks, per_share = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    block = shares * per_share
    rows = blocks * block
    lengths = {c: draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows)) for c in ("x", "y")}
    order = draw(st.permutations(range(rows)))
    spec = make_spec(shares)
    table = DockTable(spec)
    table.begin(0, rows, 1, block, {"train": order})
    arrivals = [(column, row) for column in ("x", "y") for row in range(rows)]
    done = [[] for _ in range(shares)]
    for column, row in draw(st.permutations(arrivals)):
        put(table, [row], column, [lengths[column][row]])
        what = draw(st.sampled_from(["nothing", "nothing", "claim", "restart"]))
        if what == "claim":
            share = draw(st.integers(0, shares - 1))
            claim = table.claim("train", 0, draw(st.integers(1, block)), share)
            if claim is not NOT_YET and claim is not None:
                if draw(st.booleans()):
                    done[share] += claim.rows
                    table.ack(0, claim.lease)
                else:
                    table.release(0, claim.lease)
        elif what == "restart":
            state, payloads = table.snapshot()
            table = DockTable(spec)
            table.restore(state, payloads)
    done = take_all(table, shares, draw(st.integers(1, block)), done)
    for number in range(blocks):
        members = order[number * block : (number + 1) * block]
        costs = np.array([lengths["x"][row] + lengths["y"][row] for row in members])
        expected = [[members[index] for index in part] for part in longest_first(costs, shares)]
        assert [part[number * per_share : (number + 1) * per_share] for part in done] == expected


def test_a_block_is_handed_out_when_all_of_it_is_there():
    table = DockTable(make_spec(2, train={"needs": ("x",), "balance": ("x",)}))
    table.begin(0, 8, 1, 4)
    put(table, [0, 1, 2, 4, 5, 6, 7], "x", [9, 8, 7, 1, 2, 3, 4])
    assert table.claim("train", 0, 1, 0) is NOT_YET
    assert "row 3 lacks x" in table.describe_wait("train", 0, 1, 0, 1.0)
    put(table, [3], "x", [1])
    assert table.claim("train", 0, 8, 0).rows == (0, 3)
    assert table.claim("train", 0, 8, 1).rows == (1, 2)
    assert table.claim("train", 0, 8, 0).rows == (4, 7)


def test_a_loss_in_a_block_that_is_being_worked_on_moves_no_row():
    """The values that are made again may have other lengths: who owns a row stays; other blocks are dealt anew."""
    table = DockTable(make_spec(2, train={"needs": ("x",), "balance": ("x",)}))
    table.begin(0, 8, 1, 4)
    table.put(0, as_rows(range(8)), ["seed"], "payload", 8)
    payloads = []
    for lengths in ([9, 1, 1, 1], [9, 1, 1, 1]):
        claim = table.claim("make", 0, 4)
        payloads.append(put(table, claim.rows, "x", lengths))
        table.ack(0, claim.lease)
    done = table.claim("train", 0, 1, 0)
    assert done.rows == (0,)
    table.ack(0, done.lease)
    held = table.claim("train", 0, 1, 1)
    assert held.rows == (1,)
    assert table.lose(payloads) == {0: {"make": [1, 2, 3, 4, 5, 6, 7]}}
    with pytest.raises(DockError, match="not held"):
        table.ack(0, held.lease)
    for lengths in ([50, 40, 30], [1, 9, 9, 1]):
        claim = table.claim("make", 0, 4)
        put(table, claim.rows, "x", lengths)
        table.ack(0, claim.lease)
    assert table.claim("train", 0, 4, 0).rows == (3,)
    assert table.claim("train", 0, 4, 1).rows == (1, 2)
    assert table.claim("train", 0, 4, 0).rows == (5, 7), "0 and 1 would be dealt [5, 7], [4, 6] by the new lengths"
    assert table.claim("train", 0, 4, 1).rows == (4, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": None}, "needs a partition"),
        ({"guarantee_order": False}, "guarantee_order: true"),
        ({"train": {"grouped": True}}, "grouped: false"),
        ({"train": {"balance": ("seed",)}}, r"balanced by \['seed'\]: expected jagged columns that it needs"),
        ({"train": {"needs": ("y", "seed"), "balance": ("seed",)}}, r"balanced by \['seed'\]: expected jagged"),
        ({"train": {"all_prompts": True}}, "has all_prompts but puts nothing"),
        ({"train": {"needs": ("x",), "balance": ("x",), "all_prompts": True, "puts": ("y",)}}, "cannot be balanced"),
        ({"train": {"max_staleness": -1}}, "max_staleness = -1"),
    ],
)
def test_a_specification_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(DockError, match=message):
        make_spec(2, **changes)


@pytest.mark.parametrize(("rows", "block"), [(6, 3), (6, 4), (8, 6)])
def test_blocks_that_cannot_be_dealt_out_equally_are_refused(rows, block):
    table = DockTable(make_spec(2))
    with pytest.raises(
        DockError, match=f"block_rows = {block} to be a multiple of its 2 shares, and the {rows} rows"
    ):
        table.begin(0, rows, 1, block)
    table.begin(0, rows, 1, 2)


@pytest.mark.parametrize("parts", [[[0, 1, 2], [3]], [[0, 1], [1, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]])
def test_a_partition_that_is_none_is_refused(parts):
    table = DockTable(make_spec(2, lambda lengths, shares: parts, train={"needs": ("x",), "balance": ("x",)}))
    table.begin(0, 4, 1, 4)
    put(table, range(4), "x", [1, 2, 3, 4])  # the values are there, whatever becomes of them
    with pytest.raises(DockError, match="the partition for 'train' is not one of 4 rows into equally many"):
        table.claim("train", 0, 2)


def test_rows_are_acknowledged_although_a_partition_fails_and_it_is_asked_again():
    parts = []
    table = DockTable(make_spec(2, lambda lengths, shares: parts[0], train={"needs": ("x",), "balance": ("x",)}))
    table.begin(0, 4, 1, 4)
    table.put(0, as_rows(range(4)), ["seed"], "payload", 8)
    claim = table.claim("make", 0, 4)
    lengths = {"x": np.array([1, 2, 3, 4])}
    table.put(0, as_rows(range(4)), ["x"], "payload", 8, lengths, lease=claim.lease)
    assert table.claim("make", 0, 4) is None
    with pytest.raises(IndexError):
        table.claim("train", 0, 2)
    parts.append([np.array([0, 3]), np.array([1, 2])])
    assert table.claim("train", 0, 2, 1).rows == (1, 2)
    assert table.claim("train", 0, 2, 0).rows == (0, 3)


def test_rows_wait_for_a_policy_that_is_new_enough(new_dock):
    columns = {"x": ColumnSpec("int64", "scalar")}
    consumers = {"rollout": ConsumerSpec(("x",), max_staleness=1), "train": ConsumerSpec(("x",))}
    dock = new_dock(DockSpec(columns, consumers, renew_leases=False))
    dock.begin(2, 2, 1, 2)
    dock.put(2, range(2), {"x": range(2)})
    assert dock.try_claim("rollout", 2, 1) is NOT_YET
    assert dock.claim("train", 2, 1).rows == (0,)
    with pytest.raises(DockTimeout):
        dock.claim("rollout", 2, 1, timeout=0.2)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(dock.claim("rollout", 2, 1, timeout=20)), daemon=True)
    thread.start()
    dock.advance(1)
    thread.join(10)
    assert answers[0].rows == (0,)
    dock.advance(1)
    with pytest.raises(DockError, match="policy version 0: it is 1 already"):
        dock.advance(0)
    assert dock.claim("rollout", 2, 1).rows == (1,)
