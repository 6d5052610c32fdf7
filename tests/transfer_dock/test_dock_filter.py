"""Dynamic sampling: rejected groups, prompts that come in waves, surplus that is carried over, filling up."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.common.errors import DockError, DockTimeout
from mindspeed_rl.transfer_dock.arrays import as_rejected, as_rows
from mindspeed_rl.transfer_dock.selection import FilterState
from mindspeed_rl.transfer_dock.spec import NOT_YET, Claim, ColumnSpec, ConsumerSpec, DockSpec, Filter, Selection
from mindspeed_rl.transfer_dock.table import DockTable

COLUMNS = {name: ColumnSpec("int64") for name in ("prompt", "response", "reward", "score")}


def consumers(shares=1):
    return {
        "rollout": ConsumerSpec(("prompt",), shares, puts=("response",), all_prompts=True),
        "reward": ConsumerSpec(("response",), grouped=True, puts=("reward",), all_prompts=True),
        "score": ConsumerSpec(("prompt", "response"), shares, puts=("score",)),
        "train": ConsumerSpec(("response", "reward", "score"), shares),
    }


# --- the rule


@pytest.mark.parametrize("keep_order", [True, False])
def test_rejected_groups_are_not_selected_and_surplus_is_left(keep_order):
    state = FilterState(Filter(2), np.zeros(5, int), keep_order)
    state.judge(np.arange(5), np.array([1, 4]))
    assert state.completed([3]) == ([] if keep_order else [3])
    assert state.completed([1, 4, 2]) == ([] if keep_order else [2])
    assert state.completed([0]) == ([0, 2] if keep_order else []), "in order, the first ones that qualify"
    assert state.is_over
    assert state.left() == ([3] if keep_order else [0])
    assert state.counts == {"complete": 5, "rejected": 2, "selected": 2, "filled": 0}
    copy = FilterState(Filter(2), np.zeros(5, int), keep_order)
    copy.restore(state.state())
    assert (copy.selected, copy.left(), copy.counts) == (state.selected, state.left(), state.counts)


@pytest.mark.parametrize("keep_order", [True, False])
def test_rejected_groups_make_up_the_number_when_no_more_prompts_come(keep_order):
    state = FilterState(Filter(3), np.zeros(2, int), keep_order)
    state.judge(np.arange(2), np.array([0]))
    assert state.completed([0, 1]) == ([] if keep_order else [1])
    with pytest.raises(DockError, match="fill: 2 of 2 groups are complete, and 3 are needed"):
        state.fill()
    state.extend(3)
    with pytest.raises(DockError, match="fill: 2 of 5 groups are complete"):
        state.fill()
    state.judge(np.arange(2, 5), np.array([2, 4]))
    assert state.completed([4, 2, 3]) == ([] if keep_order else [3])
    assert state.fill() == ([0, 1, 3] if keep_order else [0])
    assert state.counts == {"complete": 5, "rejected": 3, "selected": 3, "filled": 1}
    assert state.left() == [], "what is rejected goes no further"
    assert state.fill() == []


def test_groups_that_are_made_again_are_judged_again():
    state = FilterState(Filter(1), np.zeros(3, int), True)
    state.judge(np.arange(2), np.array([0, 1]))
    state.completed([0, 1])
    state.incomplete([0])
    assert state.completed([2]) == [], "group 0 is to be made again"
    state.judge(np.array([0]), np.array([], int))
    assert state.completed([0]) == [0]
    assert state.left() == [2]


# --- several iterations, against a model


class Run:
    """Iterations with workers that finish in random order, controllers that die, and payloads that are lost.

    A group's fate is drawn when it is judged. Values are (column, prompt, sample, how often it was made).
    """

    def __init__(self, seed):
        self.random = random.Random(seed)  # hypothesis would be slow with so many choices
        draw = self.random.randint
        self.group, self.select = draw(1, 2), draw(1, 3)
        self.waves, self.ordered = draw(1, 3), bool(draw(0, 1))
        self.loses = bool(draw(0, 1))
        self.spec = DockSpec(COLUMNS, consumers(draw(1, 2)), self.ordered)
        self.new_table = lambda: DockTable(self.spec, clock=lambda: 0.0)
        self.table = self.new_table()
        self.drawn = 0  # prompts so far
        self.carried = []  # prompts, in order
        self.qualifies = {}  # prompt -> the last judgement
        self.made = {}  # (column, prompt, sample) -> value
        self.judged = []  # prompts, each time
        self.dropped, self.trained, self.filled = [], [], []

    def put(self, number, rows, column, claim=None, rejected=None):
        names = [(column, self.prompts[row // self.group], row % self.group) for row in rows]
        values = [(*name, self.made.get(name, (0,))[-1] + 1) for name in names]
        self.made |= zip(names, values, strict=True)
        lease = None if claim is None else claim.lease
        judged = as_rejected(rejected, [column])
        self.table.put(number, as_rows(rows), [column], values, 8, lease=lease, rejected=judged)

    def check_values(self, claim):
        for column, locations in claim.locations.items():
            for row, location in zip(claim.rows, locations.tolist(), strict=True):
                name = (column, self.prompts[row // self.group], row % self.group)
                assert claim.payloads[location >> 32][location & 0xFFFFFFFF] == self.made[name]

    def iteration(self, number):
        block = self.group * self.random.randint(1, self.select)
        former = number - 1 if number else None
        carried = self.table.begin(number, self.select, self.group, block, None, Filter(self.select), former)
        assert carried == len(self.carried)
        if number:
            self.table.clear(number - 1)
        self.prompts = list(self.carried)
        self.put_wave(number)
        trained = []
        for wave in range(1, self.waves + 2):
            trained += self.work(number)
            groups = self.table.stats()["groups"][number]
            assert groups["complete"] == len(self.prompts)
            qualifying = [prompt for prompt in self.prompts if self.qualifies[prompt]]
            assert groups["rejected"] == len(self.prompts) - len(qualifying)
            is_enough = groups["selected"] == self.select
            assert self.loses or is_enough == (len(qualifying) >= self.select)
            if is_enough:
                break
            if wave == self.waves:
                self.table.fill(number)
                trained += self.work(number)
                break
            self.table.extend(number, self.select)
            self.put_wave(number)
        self.check(number, trained, qualifying)

    def put_wave(self, number):
        first = len(self.prompts) * self.group
        self.prompts += range(self.drawn, self.drawn + self.select)
        self.drawn += self.select
        self.put(number, range(first, first + self.select * self.group), "prompt")

    def check(self, number, rows, qualifying):
        selected = list(dict.fromkeys(row // self.group for row in rows))
        assert sorted(rows) == [p * self.group + s for p in sorted(selected) for s in range(self.group)]
        assert len(selected) == self.select
        names = [self.prompts[prompt] for prompt in selected]
        assert self.loses or set(self.carried) <= set(names), "first in line"
        if self.ordered and not self.loses:
            rejected = [prompt for prompt in self.prompts if prompt not in qualifying]
            assert set(names) == set((qualifying + rejected)[: self.select])
        filled = [name for name in names if not self.qualifies[name]]
        assert self.table.stats()["groups"][number]["filled"] == len(filled)
        assert self.loses or len(filled) == max(0, self.select - len(qualifying))
        self.trained += names
        self.filled += filled
        left = [prompt for prompt in self.prompts if prompt not in names]
        self.carried = [prompt for prompt in left if self.qualifies[prompt]]
        self.dropped += [prompt for prompt in left if not self.qualifies[prompt]]

    def work(self, number):
        """Everybody works, in random order, until nothing is left to do; returns the rows trained on."""
        held, rows = [], []
        for _ in range(2000):
            chance = self.random.randint(0, 19)
            if chance == 0:  # a new controller goes on, with the leases forgotten
                state, payloads = self.table.snapshot()
                self.table = self.new_table()
                self.table.restore(state, payloads)
                held = []
            elif chance == 1 and self.loses:
                held = self.lose(number, held)
            idle = True
            for name, consumer in self.spec.consumers.items():
                for share in range(consumer.shares):
                    count = self.group * self.random.randint(1, 2)
                    claim = self.table.claim(name, number, count, share)
                    if claim is not None and claim is not NOT_YET:
                        self.check_values(claim)
                        held.append(claim)
                        idle = False
            if held:
                rows += self.finish(number, held.pop(self.random.randrange(len(held))))
            elif idle:
                return rows
        raise AssertionError("somebody waits for ever")

    def finish(self, number, claim):
        self.check_values(claim)
        if claim.consumer == "train":
            self.table.ack(number, claim.lease)
            return list(claim.rows)
        rejected = None
        if claim.consumer == "reward":
            prompts = sorted({row // self.group for row in claim.rows})
            for prompt in prompts:
                name = self.prompts[prompt]
                assert self.loses or name not in self.judged
                self.judged.append(name)
                self.qualifies[name] = bool(self.random.randint(0, 1))
            rejected = [row for row in claim.rows if not self.qualifies[self.prompts[row // self.group]]]
            rejected = rejected[:: self.random.randint(1, self.group)]  # one row of a group is enough
        column = self.spec.consumers[claim.consumer].puts[0]
        self.put(number, claim.rows, column, claim, rejected)
        return []

    def lose(self, number, held):
        """A process dies with something that a stage has made; the leases of who was to read it end."""
        _, payloads = self.table.snapshot()
        made = [key for key, values in payloads.items() if values[0][0] != "prompt"]
        if made:
            self.table.lose([self.random.choice(made)])
        alive = []
        for claim in held:
            try:
                self.table._held(number, claim.lease)
            except DockError:
                continue
            alive.append(claim)
        return alive


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_every_prompt_is_trained_on_once_or_dropped_for_cause_or_still_carried(seed):
    run = Run(seed)
    for number in range(3):
        run.iteration(number)
    assert len(run.trained) == len(set(run.trained)) == 3 * run.select
    assert sorted(run.trained + run.dropped + run.carried) == list(range(run.drawn))
    assert not any(run.qualifies[prompt] for prompt in run.dropped)
    assert run.drawn <= 3 * run.waves * run.select
    assert run.loses or sorted(run.judged) == list(range(run.drawn)), "nothing is scored twice"


# --- what both docks promise


def tokens(*values):
    return [torch.tensor([value]) for value in values]


def work(dock, number, rejected=()):
    """Everybody does what there is to do; returns the rows trained on."""
    trained = []
    for name, consumer in dock.spec.consumers.items():
        while isinstance(claim := dock.try_claim(name, number, 2), Claim):
            judged = [row for row in claim.rows if row in rejected] if name == "reward" else None
            dock.ack(claim, {column: tokens(*claim.rows) for column in consumer.puts}, rejected=judged)
            trained += claim.rows if name == "train" else ()
    return trained


@pytest.mark.parametrize("keep_order", [True, False])
def test_prompts_come_in_waves_until_enough_groups_qualify_and_surplus_goes_on(new_dock, keep_order):
    spec = DockSpec(COLUMNS, consumers(), keep_order)
    dock = new_dock(spec)
    assert dock.begin(0, 2, 2, 4, selection=Filter(2)) == 0
    dock.put(0, range(4), {"prompt": tokens(*range(4))})
    trained = work(dock, 0, rejected=[0, 1])  # group 0
    assert dock.claim("rollout", 0, 2) is None, "nothing is left to do of the prompts that are there"
    assert trained == ([] if keep_order else [2, 3])
    dock.extend(0, 2)
    assert dock.try_claim("rollout", 0, 2) is NOT_YET
    dock.put(0, range(4, 8), {"prompt": tokens(*range(4, 8))})
    snapshot = dock.snapshot()
    dock = new_dock(spec)
    dock.restore(snapshot)
    trained += work(dock, 0)
    assert trained == [2, 3, 4, 5]
    assert dock.claim("train", 0, 2) is None
    assert dock.stats()["groups"] == {0: {"complete": 4, "rejected": 1, "selected": 2, "filled": 0}}
    # the surplus group 3 comes first, and the next wave makes up what lacks
    assert dock.begin(1, 2, 2, 4, selection=Filter(2), carry_from=0) == 1
    dock.clear(0)
    dock.put(1, range(2, 6), {"prompt": tokens(12, 13, 14, 15)})
    claim = dock.claim("rollout", 1, 2)
    assert claim.rows == (2, 3), "rows 0 and 1 are complete"
    dock.release(claim)
    assert work(dock, 1, rejected=[2, 3]) == [0, 1, 4, 5]
    assert dock.begin(2, 2, 2, 4, selection=Filter(2), carry_from=1) == 0
    dock.clear(1)
    dock.put(2, range(4), {"prompt": tokens(*range(4))})
    assert work(dock, 2, rejected=range(4)) == []
    with pytest.raises(DockTimeout, match="2 groups are complete and 2 of them rejected, 2 are needed"):
        dock.claim("train", 2, 2, timeout=0.1)
    dock.fill(2)
    assert work(dock, 2) == [0, 1, 2, 3]
    assert dock.stats()["groups"] == {2: {"complete": 2, "rejected": 2, "selected": 2, "filled": 2}}


def test_what_a_filter_cannot_do_is_refused(new_dock):
    dock = new_dock(DockSpec(COLUMNS, consumers()))
    for message, arguments in {
        "prompts of the filter = 0: expected at least 1": {"selection": Filter(0)},
        r"orders for \['reward'\], which work on all prompts": {"selection": Filter(1), "orders": {"reward": [1, 0]}},
    }.items():
        with pytest.raises(DockError, match=message):
            dock.begin(0, 2, 1, 1, **arguments)
    dock.begin(0, 2, 1, 1)
    dock.begin(1, 2, 1, 1, selection=Selection(1, 2))
    dock.begin(2, 2, 1, 1, selection=Filter(2))
    for number in (0, 1):
        dock.put(number, [0, 1], {"prompt": tokens(0, 1)})
        with pytest.raises(DockError, match="not begun with a filter"):
            dock.extend(number, 1)
        with pytest.raises(DockError, match="not begun with a filter"):
            dock.fill(number)
        claim = dock.claim("rollout", number, 1)
        with pytest.raises(DockError, match="'rollout' cannot reject groups"):
            dock.ack(claim, {"response": tokens(1)}, rejected=[0])
    with pytest.raises(DockError, match="of the same kind"):
        dock.begin(3, 2, 1, 1, selection=Filter(1), carry_from=1)
    with pytest.raises(DockError, match="fill: 0 of 2 groups are complete, and 2 are needed"):
        dock.fill(2)
    with pytest.raises(DockError, match="extend: 'rollout' is not done with 2 of 2 rows"):
        dock.extend(2, 2)
    dock.put(2, [0, 1], {"prompt": tokens(0, 1)})
    dock.ack(dock.claim("rollout", 2, 2), {"response": tokens(0)}, rows=[0])
    claim = dock.claim("reward", 2, 1)
    with pytest.raises(DockError, match="row 1 is rejected, but is not one that 'reward' is done with"):
        dock.ack(claim, {"reward": tokens(0)}, rejected=[1])
    with pytest.raises(DockError, match="judged without results"):
        dock.ack(claim, rejected=[0])
    dock.ack(claim, {"reward": tokens(0)}, rejected=[])
    dock.ack(dock.claim("rollout", 2, 1), {"response": tokens(1)})
    dock.ack(dock.claim("reward", 2, 1), {"reward": tokens(1)}, rejected=[])
    with pytest.raises(DockError, match="'score' cannot reject groups"):
        dock.ack(dock.claim("score", 2, 1), {"score": tokens(0)}, rejected=[])
    with pytest.raises(DockError, match="enough groups are selected"):
        dock.extend(2, 2)


def test_shares_get_equally_many_groups_of_every_wave_give_or_take_one():
    table = DockTable(DockSpec(COLUMNS, consumers(shares=2)))
    table.begin(0, 4, 2, 8, selection=Filter(4))
    for number in range(3):
        carried = table.stats()["groups"][number]["complete"]
        for wave in range(2):
            first = 2 * (carried + 4 * wave)
            table.put(number, as_rows(range(first, first + 8)), ["prompt"], "payload", 8)
            by_share = [rows_of(table, number, share) for share in range(2)]
            assert sum(map(len, by_share)) == 8
            assert abs(len(by_share[0]) - len(by_share[1])) <= 2, "rows of one group"
            judge(table, number, qualifying=3 if wave == 0 and not carried else 2)
            if wave == 0 and table.stats()["groups"][number]["selected"] < 4:
                table.extend(number, 4)
            else:
                break
        table.begin(number + 1, 4, 2, 8, selection=Filter(4), carry_from=number)
        table.clear(number)


def rows_of(table, number, share):
    rows = []
    while isinstance(claim := table.claim("rollout", number, 2, share), Claim):
        table.put(number, as_rows(claim.rows), ["response"], "payload", 8, lease=claim.lease)
        rows += claim.rows
    return rows


def judge(table, number, qualifying):
    while isinstance(claim := table.claim("reward", number, 2), Claim):
        qualifying -= 1
        rejected = as_rows(claim.rows) if qualifying < 0 else as_rejected([], True)
        table.put(number, as_rows(claim.rows), ["reward"], "payload", 8, lease=claim.lease, rejected=rejected)


# --- losses


def test_a_surplus_group_that_is_lost_is_made_and_judged_again():
    table = DockTable(DockSpec(COLUMNS, consumers(), guarantee_order=False))
    table.begin(0, 1, 1, 1, selection=Filter(1))
    table.put(0, as_rows([0]), ["prompt"], "payload", 8)
    rows_of_wave(table, 0, rejected=[0])
    table.extend(0, 2)
    table.put(0, as_rows([1, 2]), ["prompt"], "payload", 8)
    payloads = rows_of_wave(table, 0)
    assert table.stats()["groups"][0]["selected"] == 1
    assert table.lose([payloads[2]]) == {0: {"rollout": [2], "reward": [2]}}
    assert table.begin(1, 1, 1, 1, selection=Filter(1), carry_from=0) == 1, "with its prompt, which is there still"
    table.put(1, as_rows([1]), ["prompt"], "payload", 8)
    rows_of_wave(table, 1, rejected=[0])
    assert table.claim("score", 1, 1).rows == (1,), "now it does not qualify"
    assert table.stats()["groups"][1] == {"complete": 2, "rejected": 1, "selected": 1, "filled": 0}


def rows_of_wave(table, number, rejected=()):
    """Generate and judge one row after the other; returns {row: payload of its response}."""
    made = {}
    while isinstance(claim := table.claim("rollout", number, 1), Claim):
        made[claim.rows[0]] = table.put(number, as_rows(claim.rows), ["response"], "payload", 8, lease=claim.lease)
    while isinstance(claim := table.claim("reward", number, 1), Claim):
        judged = as_rejected([row for row in claim.rows if row in rejected], True)
        table.put(number, as_rows(claim.rows), ["reward"], "payload", 8, lease=claim.lease, rejected=judged)
    return made
