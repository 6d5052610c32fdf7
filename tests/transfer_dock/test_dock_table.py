"""The state machine against an independent reference, under random schedules of puts, claims, faults and restores."""

import itertools

import numpy as np
import pytest
from dock_reference import Reference
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.arrays import as_rows
from mindspeed_rl.transfer_dock.queues import owners
from mindspeed_rl.transfer_dock.spec import NOT_YET, ColumnSpec, ConsumerSpec, DockSpec, Selection
from mindspeed_rl.transfer_dock.table import DockTable

LEASE = 10.0
COLUMNS = ("a", "b", "c")


class DockMachine(RuleBasedStateMachine):
    """Drives a table and the references side by side."""

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        self.group = draw(st.integers(1, 3))
        prompts = draw(st.integers(1, 6))
        self.rows = prompts * self.group
        block = self.group * draw(st.integers(1, prompts))
        keep_order = draw(st.booleans())
        consumers = {
            name: ConsumerSpec(
                tuple(draw(st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True))),
                draw(st.integers(1, 3)),
                draw(st.booleans()),
            )
            for name in ("x", "y")
        }
        self.spec = DockSpec({c: ColumnSpec("int64") for c in COLUMNS}, consumers, keep_order, LEASE)
        self.now = 0.0
        self.table = self.new_table()
        groups = draw(st.permutations(range(prompts))) if keep_order else range(prompts)
        order = [g * self.group + s for g in groups for s in range(self.group)]
        self.table.begin(0, prompts, self.group, block, {"x": order} if keep_order else None)
        self.references = {
            name: Reference(
                c.needs, c.shares, c.grouped, keep_order, self.rows, self.group, block,
                order if name == "x" else range(self.rows),
            )
            for name, c in consumers.items()
        }  # fmt: skip
        self.present = {row: set() for row in range(self.rows)}
        self.leases = []  # [claim, rows of it that are held, when the lease began, holder]
        self.seen = {}  # holder -> when it gave its last sign of life
        if draw(st.booleans()):  # half of the schedules start with rows to claim: those that matter come sooner
            self.supply(draw(st.permutations(range(self.rows))), COLUMNS)

    def new_table(self):
        return DockTable(self.spec, clock=lambda: self.now)

    @rule(data=st.data())
    def put(self, data):
        columns = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True))
        rows = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=self.rows, unique=True))
        if any(self.present[row] & set(columns) for row in rows):
            with pytest.raises(DockError, match="already"):
                self.table.put(0, as_rows(rows), columns, "payload", 8)
            rows = [row for row in rows if not self.present[row] & set(columns)]
        if rows:
            self.supply(rows, columns)

    def supply(self, rows, columns):
        self.table.put(0, as_rows(rows), columns, "payload", 8)
        for row in rows:
            self.present[row] |= set(columns)
        for reference in self.references.values():
            if reference.needs & set(columns):
                reference.settle(self.present, rows)

    @rule(data=st.data())
    def complete_rows(self, data):
        """One put per set of missing columns, for a random part of the rows."""
        rows = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=self.rows, unique=True))
        by_lack = {}
        for row in rows:
            by_lack.setdefault(tuple(c for c in COLUMNS if c not in self.present[row]), []).append(row)
        for columns, lacking in by_lack.items():
            if columns:
                self.supply(lacking, columns)

    @rule(data=st.data(), name=st.sampled_from(["x", "y"]), units=st.integers(1, 4))
    def claim(self, data, name, units):
        share = data.draw(st.integers(0, len(self.references[name].owned) - 1))
        self.check_claim(name, units, share, data.draw(st.sampled_from([None, "p", "q"])))

    def check_claim(self, name, units, share, holder=None):
        reference = self.references[name]
        expected = reference.claim(share, units * reference.unit, self.present)
        claim = self.table.claim(name, 0, units * reference.unit, share, holder=holder)
        if expected is None or expected is NOT_YET:
            assert claim is expected
        else:
            assert list(claim.rows) == expected
            assert all((locations > 0).all() for locations in claim.locations.values())
            self.leases.append([claim, list(claim.rows), self.now, holder])

    @rule(units=st.integers(1, 2))
    def everyone_claims(self, units):
        for name, reference in self.references.items():
            for share in range(len(reference.owned)):
                self.check_claim(name, units, share)

    @rule(data=st.data(), acked=st.booleans())
    def end(self, data, acked):
        if not self.leases:
            return
        claim, rows, *_ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        finish = self.table.ack if acked else self.table.release
        finish(0, claim.lease)
        self.references[claim.consumer].end(claim.share, rows, acked)
        with pytest.raises(DockError, match="not held"):
            finish(0, claim.lease)

    @rule(data=st.data())
    def ack_some(self, data):
        """Some units of a lease, in any order; the others stay held."""
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases))
        claim, held, *_ = lease
        unit = self.references[claim.consumer].unit
        units = data.draw(st.lists(st.integers(0, len(held) // unit - 1), min_size=1, unique=True))
        rows = [row for index in units for row in held[index * unit : (index + 1) * unit]]
        if unit > 1:
            with pytest.raises(DockError, match="takes whole groups"):
                self.table.ack(0, claim.lease, as_rows(rows[1:]))
        self.table.ack(0, claim.lease, as_rows(rows))
        self.references[claim.consumer].end(claim.share, rows, True)
        lease[1] = [row for row in held if row not in rows]
        with pytest.raises(DockError, match="not held"):
            self.table.ack(0, claim.lease, as_rows(rows))
        if not lease[1]:
            self.leases.remove(lease)

    @rule(holder=st.sampled_from(["p", "q"]))
    def renew(self, holder):
        self.table.renew(holder)
        self.seen[holder] = self.now

    @rule(seconds=st.sampled_from([0.5, LEASE / 2, LEASE]))
    def wait(self, seconds):
        self.now += seconds
        self.table.expire()
        ends = {
            claim.lease: max(since, self.seen.get(holder, 0.0)) + LEASE for claim, _, since, holder in self.leases
        }
        for claim, rows, *_ in sorted(self.leases, key=lambda lease: (ends[lease[0].lease], lease[0].lease)):
            if ends[claim.lease] <= self.now:
                self.references[claim.consumer].end(claim.share, rows, False)
        self.leases = [lease for lease in self.leases if ends[lease[0].lease] > self.now]

    @precondition(lambda self: self.spec.guarantee_order)
    @rule()
    def restart(self):
        """The controller dies, a new one takes over its snapshot: acked rows stay acked, leased ones come back.

        Without the guarantee of order, snapshots forget which rows had come back before; `teardown` covers that.
        """
        state, payloads = self.table.snapshot()
        self.table = self.new_table()
        self.table.restore(state, payloads)
        for claim, rows, *_ in self.leases:
            self.references[claim.consumer].end(claim.share, rows, False)
            with pytest.raises(DockError, match="not held"):
                self.table.ack(0, claim.lease)
        self.leases, self.seen = [], {}

    @invariant()
    def nothing_twice(self):
        for reference in getattr(self, "references", {}).values():
            seen = [row for held in reference.out + reference.done for unit in held for row in unit]
            assert len(seen) == len(set(seen))

    def teardown(self):
        """Whatever happened: put the rest, consume the rest, and every row was acknowledged exactly once."""
        if not hasattr(self, "table"):
            return
        for row, column in itertools.product(range(self.rows), COLUMNS):
            if column not in self.present[row]:
                self.table.put(0, as_rows([row]), [column], "payload", 8)
        state, payloads = self.table.snapshot()  # leases of lost consumers end here
        self.table = self.new_table()
        self.table.restore(state, payloads)
        for name, reference in self.references.items():
            for share, owned in enumerate(reference.owned):
                while (claim := self.table.claim(name, 0, 2 * reference.unit, share)) is not None:
                    self.table.ack(0, claim.lease)
                    reference.done[share] += [
                        tuple(claim.rows[i : i + reference.unit]) for i in range(0, len(claim), reference.unit)
                    ]
                assert len(reference.done[share]) == len(owned)
            done = [row for share in reference.done for unit in share for row in unit]
            assert sorted(done) == list(range(self.rows))
        self.table.clear(0)
        late = [claim.lease for claim, *_ in self.leases] or [0]
        for call in (
            lambda: self.table.put(0, as_rows([0]), ["a"], "payload", 8),
            lambda: self.table.claim("x", 0, self.group),
            lambda: self.table.ack(0, late[0]),
            lambda: self.table.release(0, late[0]),
            lambda: self.table.clear(0),
        ):
            with pytest.raises(DockError, match="iteration 0 has been cleared"):
                call()
        assert (self.table.live_bytes, self.table.stats()["rows_out"]) == (0, 0)


TestDockMachine = DockMachine.TestCase
TestDockMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize(("units", "block", "shares"), [(1, 1, 1), (12, 4, 2), (13, 5, 3), (7, 7, 9), (100, 9, 4)])
def test_shares_are_contiguous_parts_of_every_block_and_cover_all(units, block, shares):
    owner = owners(units, block, shares)
    parts = [np.flatnonzero(owner == share) for share in range(shares)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(units))
    for start in range(0, units, block):
        rows = list(range(start, min(start + block, units)))
        expected = [rows[d * len(rows) // shares : (d + 1) * len(rows) // shares] for d in range(shares)]
        assert [[r for r in part.tolist() if r in rows] for part in parts] == expected


def _table(**kwargs):
    consumers = {"x": ConsumerSpec(("a",), shares=2), "g": ConsumerSpec(("a", "b"), grouped=True)}
    return DockTable(DockSpec({"a": ColumnSpec("int64"), "b": ColumnSpec("float32")}, consumers, **kwargs))


def test_the_cost_of_a_claim_does_not_grow_with_the_table():
    """Counted, not timed: reads of the readiness counters for one claim and for one refusal."""

    class Counting:
        def __init__(self, array):
            self.array, self.reads = array, 0

        def __getitem__(self, index):
            self.reads += np.size(index)
            return self.array[index]

    reads = []
    for prompts in (10, 10_000):
        table = _table(guarantee_order=True)
        table.begin(0, prompts, 4, 40)
        table.put(0, as_rows(range(prompts * 4)), ["a"], "payload", 8)
        queue = table._iterations[0].progress["x"].queue
        queue._missing = counting = Counting(queue._missing)
        for _ in range(3):
            table.claim("x", 0, 4, 0)
        assert table.claim("g", 0, 4) is NOT_YET
        reads.append(counting.reads)
    assert reads == [12, 12]


@pytest.mark.parametrize("name", ["num_prompts", "n_samples", "block_rows"])
def test_begin_refuses_sizes_below_one(name):
    sizes = {"num_prompts": 2, "n_samples": 2, "block_rows": 2, name: 0}
    with pytest.raises(DockError, match=f"{name} = 0"):
        _table().begin(0, **sizes)


@pytest.mark.parametrize("wrong", ["2", 2.0, None, True, float("nan"), [2]])
@pytest.mark.parametrize("keep_order", [True, False])
def test_what_is_no_whole_number_is_refused_by_name_and_changes_nothing(wrong, keep_order):
    table = _table(guarantee_order=keep_order)
    sizes = {"iteration": 1, "num_prompts": 2, "n_samples": 2, "block_rows": 4}
    for name in sizes:
        with pytest.raises(DockError, match=f"{name} = .*: expected an integer"):
            table.begin(**{**sizes, name: wrong})
    table.begin(**sizes)
    table.put(1, as_rows(range(4)), ["a"], "payload", 8)
    for name in ("iteration", "count", "share"):
        with pytest.raises(DockError, match=f"{name} = .*: expected an integer"):
            table.claim(**{"consumer": "x", "iteration": 1, "count": 2, "share": 0, name: wrong})
    with pytest.raises(DockError, match=r"version = .*: expected an integer"):
        table.advance(wrong)
    assert (table.version, table.stats()["rows_out"]) == (0, 0)
    assert len(table.claim("x", 1, np.int64(2), 0)) == 2


def test_an_order_is_the_docks_own():
    order = [3, 2, 1, 0]
    table = _table(guarantee_order=True)
    table.begin(0, 2, 2, 4, {"x": order})
    order.sort()
    state, payloads = table.snapshot()
    table = _table(guarantee_order=True)
    table.restore(state, payloads)
    table.put(0, as_rows(range(4)), ["a"], "payload", 8)
    assert table.claim("x", 0, 4).rows == (3, 2)


def test_a_selection_needs_somebody_who_completes_groups():
    with pytest.raises(DockError, match="selection needs a consumer with all_prompts"):
        _table().begin(0, 2, 2, 4, selection=Selection(1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 2, 3), "block_rows = 3: grouped consumer 'g' needs a multiple of n_samples = 2"),
        ((0, 2, 2, 4, {"x": [0, 1, 2, 2]}), "order for consumer 'x' is not a permutation"),
        ((0, 2, 2, 4, {"x": [0.0, 1.0, 2.0, 3.0]}), "order for consumer 'x' is not a permutation"),
        ((0, 2, 2, 4, {"g": [0, 2, 1, 3]}), "tears a group of 2 rows apart"),
        ((0, 2, 2, 4, {"z": [0, 1, 2, 3]}), r"unknown consumers \['z'\]"),
        ((0, 2, 2, 4, {"x": [[0], [1, 2, 3]]}), "order for consumer 'x' is not a permutation"),
        ((0, 2, 2, 4, [0, 1, 2, 3]), "orders = .*: expected Mapping, got list"),
        ((0, 2, 2, 4, None, 3), "selection = 3: expected Selection, got int"),
    ],
)
def test_begin_refuses_what_cannot_be_handed_out(arguments, message):
    table = _table()
    with pytest.raises(DockError, match=message):
        table.begin(*arguments)
    table.begin(0, 2, 2, 4)  # nothing of the refused call is left
    with pytest.raises(DockError, match="begun before"):
        table.begin(0, 2, 2, 4)


def test_an_order_needs_the_guarantee():
    with pytest.raises(DockError, match="guarantee_order"):
        _table(guarantee_order=False).begin(0, 2, 2, 4, {"x": [3, 2, 1, 0]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColumnSpec("float64"), "dtype 'float64'"),
        (lambda: ColumnSpec("object", "jagged"), "'jagged' takes int64 or float32"),
        (lambda: ColumnSpec("int64", "ragged"), "kind 'ragged'"),
        (lambda: DockSpec({}, {"x": ConsumerSpec(("a",))}), r"needs unknown columns \['a'\]"),
        (lambda: DockSpec({}, {"x": ConsumerSpec(())}), "one or more"),
        (lambda: DockSpec({"a": ColumnSpec("int64")}, {"x": ConsumerSpec(("a",), shares=0)}), "shares = 0"),
        (lambda: DockSpec({}, {}, lease_seconds=0), "lease_seconds = 0"),
        (lambda: DockSpec({}, {}, max_bytes=0), "max_bytes = 0"),
        (lambda: DockSpec({}, {}, max_bytes=float("nan")), "max_bytes = nan: expected an integer"),
        (lambda: DockSpec({}, {}, lease_seconds=float("inf")), "lease_seconds = inf: expected a finite number"),
        (lambda: DockSpec({}, {}, lease_seconds="1"), "lease_seconds = '1': expected a finite number"),
        (lambda: DockSpec({}, {}, guarantee_order="no"), "guarantee_order = 'no': expected bool, got str"),
        (lambda: ColumnSpec("int64", replaceable=1), "replaceable = 1: expected bool"),
        (lambda: DockSpec({"a": "int64"}, {}), "column 'a' = 'int64': expected ColumnSpec"),
        (lambda: _one(needs="a"), "needs of consumer 'x' = 'a': expected tuple, got str"),
        (lambda: _one(puts="b"), "puts of consumer 'x' = 'b': expected tuple, got str"),
        (lambda: _one(grouped="no"), "grouped of consumer 'x' = 'no': expected bool"),
        (lambda: _one(shares=2.0), "shares = 2.0: expected an integer"),
        (lambda: _one(shares=32767), "shares = 32767: expected at most 32766"),
        (lambda: _one(max_staleness=float("nan")), "max_staleness = nan: expected an integer"),
        (
            lambda: _one(puts=("b",), y=ConsumerSpec(("b",), puts=("c",)), z=ConsumerSpec(("c",), puts=("a",))),
            r"consumers \['x', 'y', 'z'\] need, directly or not, what they put themselves",
        ),
        (
            lambda: _one(puts=("b",), y=ConsumerSpec(("b",), puts=("c",), all_prompts=True)),
            r"'y' has all_prompts and needs \['b'\], which 'x' puts for selected groups only",
        ),
    ],
)
def test_a_contradictory_specification_is_refused(make, message):
    with pytest.raises(DockError, match=message):
        make()


def _one(y=None, z=None, needs=("a",), **consumer):
    columns = dict.fromkeys("abc", ColumnSpec("int64"))
    others = {name: other for name, other in {"y": y, "z": z}.items() if other is not None}
    return DockSpec(columns, {"x": ConsumerSpec(needs, **consumer), **others})


def test_a_snapshot_without_its_payloads_is_refused_and_leaves_the_dock_empty():
    table = _table()
    table.begin(0, 2, 2, 4)
    table.put(0, as_rows(range(4)), ["a"], "payload", 8)
    state, payloads = table.snapshot()
    table = _table()
    with pytest.raises(DockError, match=r"lacks payloads \[1\]"):
        table.restore(state, {})
    table.restore(state, payloads)
    assert table.claim("x", 0, 4).rows == (0, 1)


def test_rows_are_not_done_without_what_their_consumer_puts():
    table = DockTable(_one(puts=("b", "c")))
    table.begin(0, 4, 1, 4)
    table.put(0, as_rows(range(4)), ["a"], "payload", 8)
    claim = table.claim("x", 0, 4)
    table.put(0, as_rows([0, 1]), ["b", "c"], "payload", 8)
    table.put(0, as_rows([2]), ["c"], "payload", 8)
    for rows, lacking in ((None, 2), (as_rows([3, 0]), 3)):
        with pytest.raises(DockError, match=f"ack: 'x' puts '.', which row {lacking} of iteration 0 lacks"):
            table.ack(0, claim.lease, rows)
    with pytest.raises(DockError, match="puts 'b', which row 3 of iteration 0 lacks"):
        table.put(0, as_rows([3]), ["c"], "payload", 8, lease=claim.lease)
    table.put(0, as_rows([2]), ["b"], "payload", 8, lease=claim.lease)
    table.ack(0, claim.lease, as_rows([0, 1]))
    table.put(0, as_rows([3]), ["c", "b"], "payload", 8, lease=claim.lease)
    assert table.claim("x", 0, 4) is None


def test_restore_refuses_a_foreign_snapshot_and_a_dock_in_use():
    state, payloads = _table(guarantee_order=True).snapshot()
    with pytest.raises(DockError, match="other columns, consumers or order"):
        _table(guarantee_order=False).restore(state, payloads)
    table = _table(guarantee_order=True)
    table.begin(5, 1, 1, 1)
    with pytest.raises(DockError, match="must be empty"):
        table.restore(state, payloads)


def test_readiness_order_survives_a_restart():
    table = _table(guarantee_order=False)
    table.begin(0, 4, 2, 8)
    for row in (5, 0, 7, 2, 1):
        table.put(0, as_rows([row]), ["a"], "payload", 8)
    first = table.claim("x", 0, 1, 0)
    table.ack(0, first.lease)
    assert first.rows == (5,)
    state, payloads = table.snapshot()
    table = _table(guarantee_order=False)
    table.restore(state, payloads)
    assert table.claim("x", 0, 3, 1).rows == (0, 7, 2)
    assert table.claim("x", 0, 3, 0) is NOT_YET  # its quota is four rows, one is done


def test_returned_rows_go_first_in_order_and_stay_in_their_block():
    table = _table(guarantee_order=True)
    table.begin(0, 12, 1, 4)
    table.put(0, as_rows(range(12)), ["a"], "payload", 8)
    claims = [table.claim("x", 0, 1, 0) for _ in range(4)]  # share 0 owns rows 0, 1 | 4, 5 | 8, 9
    assert [claim.rows for claim in claims] == [(0,), (1,), (4,), (5,)]
    for claim in (claims[3], claims[1], claims[2]):
        table.release(0, claim.lease)
    assert table.claim("x", 0, 4, 0).rows == (1,)
    assert table.claim("x", 0, 4, 0).rows == (4, 5)
    assert table.claim("x", 0, 4, 0).rows == (8, 9)
