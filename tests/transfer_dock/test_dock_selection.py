"""Partial rollout: which groups an iteration selects, what is carried over, and who sees what."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.common.errors import DockError, DockTimeout
from mindspeed_rl.transfer_dock.arrays import as_rows
from mindspeed_rl.transfer_dock.selection import SelectionState
from mindspeed_rl.transfer_dock.spec import NOT_YET, ColumnSpec, ConsumerSpec, DockSpec, Selection
from mindspeed_rl.transfer_dock.table import DockTable

COLUMNS = {
    "prompt": ColumnSpec("int64"),
    "partial": ColumnSpec("int64", replaceable=True),
    "response": ColumnSpec("int64"),
}


def consumers(shares=1, grouped=False):
    rollout = ConsumerSpec(("prompt",), shares, grouped, ("response",), optional=("partial",), all_prompts=True)
    return {"rollout": rollout, "train": ConsumerSpec(("prompt", "response"))}


# --- the rule


def selection(keep_order, finish_oldest=True, ages=(0, 0, 1, 0)):
    """Two of four groups; group 2 is in its last iteration."""
    return SelectionState(Selection(2, 2, finish_oldest), np.array(ages), keep_order)


@pytest.mark.parametrize("finish_oldest", [True, False])
def test_without_order_groups_are_selected_when_complete_and_the_last_ones_have_their_places(finish_oldest):
    state = selection(False, finish_oldest)
    assert not state.is_enough
    assert state.completed([3]) == [3]
    assert state.is_enough is not finish_oldest, "group 2 may be ended where it is, or must be waited for"
    assert state.completed([0]) == [], "the place is kept for group 2"
    assert not state.is_over
    assert state.completed([2]) == [2]
    assert state.is_over
    assert state.is_enough
    assert state.completed([1]) == []
    assert (state.selected, state.left()) == ([3, 2], [0, 1])


@pytest.mark.parametrize("finish_oldest", [True, False])
def test_with_order_the_oldest_complete_groups_are_selected_at_the_end_in_ascending_order(finish_oldest):
    state = selection(True, finish_oldest, ages=(0, 0, 1, 0))
    assert state.completed([3]) == []
    assert state.is_enough is not finish_oldest
    assert state.completed([0]) == []
    assert state.is_enough is not finish_oldest
    assert state.completed([2]) == [0, 2]
    assert state.is_over
    assert (state.selected, state.left()) == ([0, 2], [1, 3])


def test_who_took_part_longest_is_selected_and_carried_first():
    state = SelectionState(Selection(2, 9), np.array([0, 1, 3, 2, 3]), True)
    assert state.completed([0, 1]) == [0, 1]
    assert state.left() == [2, 4, 3]
    state = SelectionState(Selection(2, 9), np.array([0, 1, 3, 2, 3]), True)
    assert state.completed([0, 1, 4, 3]) == [3, 4], "two were complete already when the others came"


def test_lost_groups_are_complete_no_more_unless_they_are_selected():
    state = selection(False, ages=(0, 0, 0, 0))
    state.completed([0])
    state = SelectionState(Selection(3, 2), np.array([0, 1, 0, 0]), True)
    state.completed([0, 2])
    state.incomplete([2])
    assert state.completed([1]) == []
    assert state.completed([3]) == [0, 1, 3]
    state.incomplete([0])
    assert state.is_over
    assert state.complete.tolist() == [True, True, False, True]
    copy = SelectionState(state.spec, state.ages, True)
    copy.restore(state.state())
    assert (copy.selected, copy.complete.tolist()) == (state.selected, state.complete.tolist())


@pytest.mark.parametrize(
    ("spec", "ages", "message"),
    [
        (Selection(0, 1), [0], "a selection of 0 prompts: the iteration has 1"),
        (Selection(2, 1), [0], "a selection of 2 prompts: the iteration has 1"),
        (Selection(1, 0), [0], "max_iterations = 0"),
        (Selection(1.0, 2), [0], "prompts of the selection = 1.0: expected an integer, got float"),
        (Selection(1, None), [0], "max_iterations = None: expected an integer"),
        (Selection(1, 1), [0, 0], "2 groups are in their last iteration of 1, but only 1 are selected"),
    ],
)
def test_a_selection_that_cannot_be_made_is_refused(spec, ages, message):
    with pytest.raises(DockError, match=message):
        SelectionState(spec, np.array(ages), True)


# --- several iterations


class Run:
    """Iterations of partial rollout with workers that finish in random order; values are (name, prompt, sample)."""

    def __init__(self, draw):
        self.draw = draw
        self.group, self.select = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        self.prompts = self.select + draw(st.integers(0, self.select))  # what is carried over can be selected at once
        self.spec = Selection(self.select, draw(st.integers(2, 3)), draw(st.booleans()))
        self.ordered, self.shares = draw(st.booleans()), draw(st.integers(1, 2))
        dock = DockSpec(COLUMNS, consumers(self.shares, draw(st.booleans())), self.ordered)
        self.new_table = lambda: DockTable(dock, clock=lambda: 0.0)
        self.table = self.new_table()
        self.unit = self.group if dock.consumers["rollout"].grouped else 1
        self.put_so_far = 0
        self.carried = []  # prompts, those that took part longest first
        self.took_part = {}  # prompt -> iterations
        self.values = {}  # (column, prompt, sample) -> value
        self.trained = []

    def put(self, iteration, rows, column, lease=None):
        names = [(column, self.in_generation[row // self.group], row % self.group) for row in rows]
        values = [(*name, object()) for name in names]
        self.values |= zip(names, values, strict=True)
        self.table.put(iteration, as_rows(rows), [column], values, 8)
        if lease is not None:
            self.table.ack(iteration, lease, as_rows(rows))

    def check_values(self, claim):
        for column, locations in claim.locations.items():
            for row, location in zip(claim.rows, locations.tolist(), strict=True):
                name = (column, self.in_generation[row // self.group], row % self.group)
                found = claim.payloads[location >> 32][location & 0xFFFFFFFF] if location else None
                assert found is self.values.get(name)

    def iteration(self, number):
        size = self.select * self.group
        order = self.draw(st.permutations(range(size))) if self.ordered and self.unit == 1 else list(range(size))
        carried = self.table.begin(
            number, self.prompts, self.group, self.group, {"train": order} if self.ordered else None,
            self.spec, number - 1 if number else None,
        )  # fmt: skip
        assert carried == len(self.carried)
        if number:
            self.table.clear(number - 1)
        fresh = list(range(self.put_so_far, self.put_so_far + self.prompts - carried))
        self.put_so_far += len(fresh)
        self.in_generation = self.carried + fresh
        for prompt in self.in_generation:
            self.took_part[prompt] = self.took_part.get(prompt, 0) + 1
            assert self.took_part[prompt] <= self.spec.max_iterations
        self.put(number, range(carried * self.group, self.prompts * self.group), "prompt")
        rows = self.work(number)
        if self.ordered:
            assert rows == [sorted(rows)[place] for place in order]
        selected = sorted({row // self.group for row in rows})
        assert sorted(rows) == [p * self.group + s for p in selected for s in range(self.group)]
        assert len(selected) == self.select
        last = [p for p, name in enumerate(self.in_generation) if self.took_part[name] == self.spec.max_iterations]
        assert set(last) <= set(selected)
        self.trained += [self.in_generation[prompt] for prompt in selected]
        left = [name for prompt, name in enumerate(self.in_generation) if prompt not in selected]
        self.carried = sorted(left, key=lambda name: -self.took_part[name])

    def work(self, number):
        """Everybody works, in random order, until training has all it asked for; returns the rows trained on."""
        trained, held = [], []
        for _ in range(1000):
            if self.draw(st.integers(0, 9)) == 0:  # a new controller goes on, with the leases forgotten
                state, payloads = self.table.snapshot()
                self.table = self.new_table()
                self.table.restore(state, payloads)
                held = []
            asked = [self.table.claim("rollout", number, self.unit, share) for share in range(self.shares)]
            for claim in asked:
                if claim is not None and claim is not NOT_YET:
                    self.check_values(claim)
                    names = [self.in_generation[row // self.group] for row in claim.rows]
                    assert claim.last == tuple(self.took_part[name] == self.spec.max_iterations for name in names)
                    held.append(claim)
            if all(claim is None for claim in asked):
                while held:  # enough: the last ones end where they are, the others say how far they came
                    claim = held.pop()
                    if claim.last[0]:
                        assert not self.spec.finish_oldest
                        self.put(number, claim.rows, "response", claim.lease)
                    else:
                        self.put(number, claim.rows, "partial")
                        self.table.release(number, claim.lease)
            elif held:
                claim = held.pop(self.draw(st.integers(0, len(held) - 1)))
                self.put(number, claim.rows, "response", claim.lease)
            while (claim := self.table.claim("train", number, 1)) is not NOT_YET:
                if claim is None:
                    return trained
                self.check_values(claim)
                self.table.ack(number, claim.lease)
                trained += claim.rows
        raise AssertionError("training waits for ever")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_prompt_is_trained_on_once_or_still_carried_and_keeps_what_it_has(data):
    run = Run(data.draw)
    for number in range(4):
        run.iteration(number)
    assert len(run.trained) == len(set(run.trained)) == 4 * run.select
    assert sorted(run.trained + run.carried) == list(range(run.put_so_far))


# --- losses


def _table(prompts, spec):
    table = DockTable(DockSpec(COLUMNS, consumers(), guarantee_order=False))
    table.begin(0, prompts, 1, 1, selection=spec)
    return table


def _generate(table, iteration, count=1):
    claim = table.claim("rollout", iteration, count)
    number = table.put(iteration, as_rows(claim.rows), ["response"], "payload", 8)
    table.ack(iteration, claim.lease)
    return claim.rows, number


def test_a_selected_group_that_is_lost_is_made_again_and_nothing_else():
    table = _table(3, Selection(1, 9))
    table.put(0, as_rows([0, 1, 2]), ["prompt"], "payload", 8)
    rows, payload = _generate(table, 0)
    assert rows == (0,)
    assert table.claim("rollout", 0, 1) is None
    assert table.lose([payload]) == {0: {"rollout": [0]}}
    table.take_woken()
    assert _generate(table, 0)[0] == (0,)
    assert (0, "rollout") in table.take_woken(), "whoever waits hears that it is over"
    assert table.claim("rollout", 0, 1) is None
    assert table.claim("train", 0, 1).rows == (0,)


def test_what_is_lost_of_a_carried_group_is_known_in_the_next_iteration():
    table = _table(2, Selection(1, 9))
    seeds = [table.put(0, as_rows([row]), ["prompt"], "payload", 8) for row in range(2)]
    rows, _ = _generate(table, 0)
    assert rows == (0,)
    table.lose([seeds[1]])
    assert table.claim("train", 0, 1).rows == (0,), "row 1 is not its business"
    assert table.claim("train", 0, 1) is NOT_YET
    assert table.begin(1, 2, 1, 1, selection=Selection(1, 9), carry_from=0) == 1
    table.clear(0)
    with pytest.raises(DockError, match=r"'prompt' of 1 rows \(0\) of iteration 1 is lost"):
        table.claim("rollout", 1, 2)
    table.put(1, as_rows([0, 1]), ["prompt"], "payload", 8)
    assert table.claim("rollout", 1, 1).rows == (0,)


# --- what both docks promise


@pytest.fixture
def make_dock(new_dock):
    def make(shares=1, **limits):
        return new_dock(DockSpec(COLUMNS, consumers(shares), **{"renew_leases": False, **limits}))

    return make


def plain(columns):
    return {name: [None if v is None else v.tolist() for v in values] for name, values in columns.items()}


def tokens(*values):
    return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize("keep_order", [True, False])
def test_what_was_begun_of_a_response_and_is_lost_is_told(keep_order):
    """Its tokens are generated again: in the iteration that goes on with it, and in no other."""
    table, spec = DockTable(DockSpec(COLUMNS, consumers(), guarantee_order=keep_order)), Selection(1, 9)
    table.begin(0, 2, 1, 1, selection=spec)
    table.put(0, as_rows([0, 1]), ["prompt"], "prompts", 8)
    held = [table.claim("rollout", 0, 1) for _ in range(2)]
    partial = table.put(0, as_rows([0]), ["partial"], "begun", 8)
    table.put(0, as_rows([1]), ["response"], "whole", 8, lease=held[1].lease)
    table.release(0, held[0].lease)
    assert table.begin(1, 2, 1, 1, selection=spec, carry_from=0) == 1
    assert table.lose([partial]) == {0: {}, 1: {"rollout": [0]}}
    assert table.rows_redone == 1
    claim = table.claim("rollout", 1, 1)
    assert claim.rows == (0,)
    assert partial not in claim.payloads


def test_whether_enough_is_complete_is_known_without_a_look_at_all_groups(monkeypatch):
    """As any claim asks: the numbers are kept, and right after every change."""
    state = SelectionState(Selection(3, 2), np.array([1, 0, 0, 0, 1, 0]), keep_order=True)
    random = np.random.default_rng(0)
    for _ in range(200):
        prompts = random.choice(6, random.integers(1, 4), replace=False).tolist()
        if random.random() < 0.6:
            state.completed(prompts)
        else:
            state.incomplete(prompts)
        if random.random() < 0.1:
            state.restore(state.state())
        if state.is_over:
            state = SelectionState(Selection(3, 2), np.array([1, 0, 0, 0, 1, 0]), keep_order=True)
        assert state.counts["complete"] == state.complete.sum()
        assert state._waiting == (~state.complete[[0, 4]]).sum()
    monkeypatch.setattr(state, "complete", None)
    assert state.is_enough in (True, False)


def test_an_unfinished_group_goes_on_where_it_was_in_the_next_iteration(make_dock):
    dock = make_dock(guarantee_order=False)
    spec = Selection(1, 2)
    assert dock.begin(0, 2, 1, 1, selection=spec) == 0
    dock.put(0, [0, 1], {"prompt": tokens(10, 11)})
    first, second = dock.claim("rollout", 0, 1), dock.claim("rollout", 0, 1)
    assert (first.last, second.last) == ((False,), (False,))
    assert plain(dock.get(first, ["prompt", "partial"])) == plain({"prompt": tokens(10), "partial": [None]})
    dock.put(0, [0], {"partial": tokens(1)})
    dock.put(0, [0], {"partial": [torch.tensor([1, 2])]})  # replaces the other
    assert dock.try_claim("rollout", 0, 1) is NOT_YET
    dock.ack(second, {"response": tokens(5)})
    assert dock.try_claim("rollout", 0, 1) is None
    dock.release(first)
    assert dock.claim("rollout", 0, 1) is None, "enough groups are complete"
    assert dock.begin(1, 2, 1, 1, selection=spec, carry_from=0) == 1
    claim = dock.claim("train", 0, 4)
    assert claim.rows == (1,)
    assert plain(dock.get(claim, ["response"])) == plain({"response": tokens(5)})
    dock.ack(claim)
    assert dock.claim("train", 0, 4) is None
    dock.clear(0)
    dock.put(1, [1], {"prompt": tokens(12)})
    claim = dock.claim("rollout", 1, 2)
    assert (claim.rows, claim.last) == ((0, 1), (True, False))
    got = dock.get(claim, ["prompt", "partial"])
    assert [value.tolist() for value in got["prompt"]] == [[10], [12]]
    assert got["partial"][0].tolist() == [1, 2]
    assert got["partial"][1] is None
    dock.ack(claim, {"response": tokens(7)}, rows=[1])
    assert dock.try_claim("train", 1, 1) is NOT_YET, "the place is kept for the group in its last iteration"
    dock.ack(claim, {"response": tokens(6)}, rows=[0])
    claim = dock.claim("train", 1, 1)
    assert (claim.rows, claim.last) == ((0,), (True,))
    dock.ack(claim)
    assert dock.claim("train", 1, 1) is None


def test_orders_are_of_the_selected_rows(make_dock):
    dock = make_dock()
    dock.begin(0, 4, 2, 2, {"train": [2, 3, 1, 0]}, Selection(2, 9))
    dock.put(0, range(8), {"prompt": tokens(*range(8))})
    claim = dock.claim("rollout", 0, 2)
    held = [claim, *(dock.claim("rollout", 0, 2) for _ in range(3))]
    assert dock.try_claim("train", 0, 2) is NOT_YET
    for claim in (held[3], held[1]):
        dock.ack(claim, {"response": tokens(*claim.rows)})
    assert dock.claim("train", 0, 9).rows == (6, 7)
    assert dock.claim("train", 0, 9).rows == (3, 2)


def test_claims_that_wait_end_as_soon_as_enough_is_complete_or_nothing_is_left_to_end(make_dock):
    dock = make_dock(shares=2)
    dock.begin(0, 2, 1, 2, selection=Selection(2, 1, finish_oldest=False))
    answers = {}

    def wait(name, share):
        answers[name] = dock.claim("rollout", 0, 1, share, timeout=20)

    threads = []
    for name, share in (("first", 0), ("idle", 0), ("second", 1)):
        threads.append(threading.Thread(target=wait, args=(name, share), daemon=True))
        threads[-1].start()
        time.sleep(0.2)
    dock.put(0, [0], {"prompt": tokens(0)})
    time.sleep(0.2)
    dock.put(0, [1], {"prompt": tokens(1)})  # handed out too: groups in their last iteration end where they are
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), f"somebody waits still; answered: {list(answers)}"
    assert answers["second"].rows == (1,)
    of_share_0 = [answers["first"], answers["idle"]]  # who of the two came first is not defined
    assert sorted(claim.rows for claim in of_share_0 if claim is not None) == [(0,)]


def test_what_cannot_be_begun_or_carried_over_is_refused(make_dock):
    dock = make_dock()
    spec = Selection(1, 2)
    dock.begin(0, 2, 1, 1)
    dock.begin(1, 2, 1, 1, selection=spec)
    for message, arguments in {
        "a selection of 3 prompts: the iteration has 2": {"selection": Selection(3, 1)},
        "between iterations with a selection only": {"selection": spec, "carry_from": 0},
        "carried over between": {"carry_from": 1},
        "only when its selection is complete": {"selection": Selection(2, 9), "carry_from": 1},
        "iteration 7 has not been begun": {"selection": spec, "carry_from": 7},
        "not a permutation of the iteration's 1 rows": {"selection": spec, "orders": {"train": [0, 1]}},
    }.items():
        with pytest.raises(DockError, match=message):
            dock.begin(2, 2, 1, 1, **arguments)
    dock.put(1, [0, 1], {"prompt": tokens(0, 1)})
    dock.ack(dock.claim("rollout", 1, 1), {"response": tokens(0)})
    with pytest.raises(DockError, match="n_samples = 2: groups of 1 are carried over"):
        dock.begin(2, 2, 2, 2, selection=spec, carry_from=1)
    assert dock.begin(2, 2, 1, 1, selection=spec, carry_from=1) == 1
    with pytest.raises(DockError, match="carried over to iteration 2 before"):
        dock.begin(3, 2, 1, 1, selection=spec, carry_from=1)  # they would be trained on twice
    dock.put(2, [1], {"prompt": tokens(0)})
    dock.ack(dock.claim("rollout", 2, 1), {"response": tokens(0)})
    dock.clear(1)
    with pytest.raises(DockError, match="iteration 1 has been cleared"):
        dock.begin(3, 2, 1, 1, selection=spec, carry_from=1)


def test_too_few_prompts_for_what_is_carried_over_are_refused(make_dock):
    dock = make_dock()
    dock.begin(0, 4, 1, 1, selection=Selection(1, 9))
    dock.put(0, range(4), {"prompt": tokens(*range(4))})
    dock.ack(dock.claim("rollout", 0, 1), {"response": tokens(0)})
    with pytest.raises(DockError, match="num_prompts = 2: 3 groups are carried over"):
        dock.begin(1, 2, 1, 1, selection=Selection(1, 9), carry_from=0)


def test_rows_that_come_back_are_handed_out_although_enough_is_complete(make_dock):
    """Groups in their last iteration have to be ended by whoever generates them: here by the next one to claim."""
    dock = make_dock(guarantee_order=False)
    dock.begin(0, 2, 1, 1, selection=Selection(2, 1, finish_oldest=False))
    dock.put(0, [0, 1], {"prompt": tokens(10, 11)})
    first, second = dock.claim("rollout", 0, 1), dock.claim("rollout", 0, 1)
    assert dock.try_claim("rollout", 0, 1) is None, "all that is left is to be ended where it is"
    dock.release(first)
    again = dock.claim("rollout", 0, 1)
    assert again.rows == first.rows
    dock.ack(again, {"response": tokens(5)})
    dock.ack(second, {"response": tokens(6)})
    assert dock.claim("train", 0, 2).rows == (0, 1)


def test_a_wait_for_rows_that_are_not_selected_says_so(make_dock):
    dock = make_dock()
    dock.begin(0, 2, 1, 1, selection=Selection(1, 2))
    with pytest.raises(DockTimeout, match="1 rows are not selected yet: 0 groups are complete, 1 are needed"):
        dock.claim("train", 0, 1, timeout=0.1)
