"""A pipeline of stages under random losses: what is lost is made again, and no row is consumed twice."""

from collections import Counter
from dataclasses import dataclass

import pytest
from dock_reference import Reference
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.arrays import as_rows
from mindspeed_rl.transfer_dock.spec import NOT_YET, ColumnSpec, ConsumerSpec, DockSpec
from mindspeed_rl.transfer_dock.table import DockTable

STAGES = ("make", "join", "late", "final", "watch")
LEASE = 10.0


@dataclass(frozen=True, eq=False)
class Value:
    """One value as it was put, and the values it was made of."""

    row: int
    column: str
    inputs: tuple["Value", ...] = ()

    @property
    def key(self):
        return self.row, self.column

    def ancestors(self):
        return {self, *(other for value in self.inputs for other in value.ancestors())}


class World:
    """Which values are there, who has done what; and what a loss means, by looking at every value's origin."""

    def __init__(self, consumers, references):
        self.consumers, self.references = consumers, references
        self.values = {}  # (row, column) -> Value
        self.seeds = {}  # row -> Value: what was put once is put again as it was

    @property
    def present(self):
        present = {row: set() for unit in self.references["make"].units for row in unit}
        for row, column in self.values:
            present[row].add(column)
        return present

    def lost_seeds(self, name):
        """Rows that a consumer waits for in vain."""
        if "seed" not in self.consumers[name].needs:
            return []
        return [r for r in self.seeds if (r, "seed") not in self.values and not self.references[name].has_done(r)]

    def is_wanted(self, key):
        row, column = key
        readers = [name for name, consumer in self.consumers.items() if column in consumer.needs]
        return not all(self.references[name].has_done(row) for name in readers)

    def is_outdated(self, value):
        """Made of something that is there no more, unless that is merely gone, because nobody wanted it."""
        for used in value.inputs:
            now = self.values.get(used.key)
            maker = next((n for n, consumer in self.consumers.items() if used.column in consumer.puts), None)
            made_again = maker is not None and not self.references[maker].has_done(used.row)
            if (now is not used and (now is not None or made_again)) or self.is_outdated(used):
                return True
        return False

    def is_sound(self, key):
        return key in self.values and not self.is_outdated(self.values[key])

    def lose(self, gone):
        """Returns {consumer: units that it must do again}."""
        self.values = {key: value for key, value in self.values.items() if value not in gone}
        again = {}
        while (found := self._next_to_redo()) is not None:
            name, unit = found
            self.references[name].again(unit)
            again.setdefault(name, []).append(unit)
            for row in unit:
                for column in self.consumers[name].puts:
                    self.values.pop((row, column), None)
        return again

    def _next_to_redo(self):
        for name, consumer in self.consumers.items():
            for unit in [unit for units in self.references[name].done for unit in units]:
                made = [(row, column) for row in unit for column in consumer.puts]
                if any(self.is_wanted(key) and not self.is_sound(key) for key in made):
                    return name, unit
        return None


class PipelineMachine(RuleBasedStateMachine):
    """make: seed -> x; join: x -> y; late: y and something else -> z; final reads all of them, watch only x."""

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        self.group, prompts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        self.rows, block = prompts * self.group, self.group * draw(st.integers(1, prompts))
        late = draw(st.sampled_from([("y",), ("x", "y"), ("seed", "y")]))
        needs = {"make": ("seed",), "join": ("x",), "late": late, "final": ("x", "y", "z"), "watch": ("x",)}
        puts = {"make": ("x",), "join": ("y",), "late": ("z",), "final": (), "watch": ()}
        used = STAGES if draw(st.booleans()) else STAGES[:-1]
        consumers = {
            name: ConsumerSpec(needs[name], draw(st.integers(1, 2)), draw(st.booleans()), puts[name]) for name in used
        }
        ordered = draw(st.booleans())
        self.exact = True  # whether the next claims can be foretold; see `lose` and `restart`
        self.spec = DockSpec({c: ColumnSpec("int64") for c in ("seed", *"xyz")}, consumers, ordered, LEASE)
        self.now = 0.0
        self.table = self.new_table()
        self.table.begin(0, prompts, self.group, block)
        references = {
            name: Reference(c.needs, c.shares, c.grouped, ordered, self.rows, self.group, block, range(self.rows))
            for name, c in consumers.items()
        }
        self.world = World(consumers, references)
        self.leases = []  # [claim, rows of it that are held, values read, expiry]
        self.payloads = {}  # number -> values
        self.consumed = Counter()  # (final consumer, row)
        self.supply(draw(st.permutations(range(self.rows)))[: draw(st.integers(1, self.rows))])
        for name in consumers:  # schedules begin anywhere, where most of them matter
            for share in range(consumers[name].shares):
                for _ in range(draw(st.integers(0, 4))):
                    if self.claim_for(name, share, draw(st.integers(1, 3))) and draw(st.integers(0, 4)):
                        self.finish(self.leases[-1], self.leases[-1][1])

    def new_table(self):
        return DockTable(self.spec, clock=lambda: self.now)

    @rule(data=st.data())
    def put_seeds(self, data):
        self.supply(data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, unique=True)))

    def supply(self, rows):
        rows = [row for row in rows if (row, "seed") not in self.world.values]
        if rows:
            self.place([self.world.seeds.setdefault(row, Value(row, "seed")) for row in rows], lease=None)

    def place(self, values, lease):
        """As an adapter does it: registered, and with a lease acknowledged, in one step."""
        rows = as_rows([value.row for value in values])
        number = self.table.put(0, rows, [values[0].column], values, 8, lease=lease)
        self.payloads[number] = values
        self.world.values |= {value.key: value for value in values}
        for reference in self.world.references.values():
            if values[0].column in reference.needs:
                reference.settle(self.world.present, rows.tolist())

    @rule(data=st.data(), units=st.integers(1, 3))
    def claim(self, data, units):
        name = data.draw(st.sampled_from(list(self.spec.consumers)))
        self.claim_for(name, data.draw(st.integers(0, self.spec.consumers[name].shares - 1)), units)

    def claim_for(self, name, share, units):
        """Claim, compare with the reference, read; returns whether rows came."""
        reference = self.world.references[name]
        count = units * reference.unit
        expected = reference.claim(share, count, self.world.present) if self.exact else ...
        try:
            claim = self.table.claim(name, 0, count, share)
        except DockError:  # "is lost"
            assert self.world.lost_seeds(name)
            assert expected in (NOT_YET, ...)
            return False
        if claim is None or claim is NOT_YET:
            assert expected in (claim, ...)
            assert claim is NOT_YET or len(reference.done[share]) == len(reference.owned[share])
            assert claim is None or not self.world.lost_seeds(name), "waits for what never comes"
            return False
        if not self.exact:
            taken = [tuple(claim.rows[i : i + reference.unit]) for i in range(0, len(claim), reference.unit)]
            gone = [unit for held in reference.out + reference.done for unit in held]
            assert all(unit in reference.units and unit not in gone for unit in taken)
            reference.out[share] += taken
        assert expected in (list(claim.rows), ...)
        self.leases.append([claim, list(claim.rows), self.read(claim), self.now + LEASE])
        return True

    def read(self, claim):
        """Values of a claim: the current ones, and none made of another than the one that is read with it."""
        seen = {}
        for column, locations in claim.locations.items():
            for row, location in zip(claim.rows, locations.tolist(), strict=True):
                seen[row, column] = claim.payloads[location >> 32][location & 0xFFFFFFFF]
        for key, value in seen.items():
            assert value.key == key
            assert value is self.world.values[key]
            assert all(seen.get(other.key, other) is other for other in value.ancestors())
        return seen

    @rule(data=st.data())
    def ack(self, data):
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            unit = self.world.references[lease[0].consumer].unit
            units = data.draw(st.lists(st.integers(0, len(lease[1]) // unit - 1), min_size=1, unique=True))
            self.finish(lease, [row for index in units for row in lease[1][index * unit : (index + 1) * unit]])

    def finish(self, lease, rows):
        """Acknowledge these rows of a lease, in that order, with results if it is a stage that makes some."""
        claim, held, seen, _ = lease
        reference, puts = self.world.references[claim.consumer], self.spec.consumers[claim.consumer].puts
        if puts:
            made = []
            for row in rows:
                unit = reference.unit_of(row)
                inputs = tuple(value for value in seen.values() if value.row in unit)
                made.append(Value(row, puts[0], inputs))
            # `end` first: the reference counts what is out, `place` what is there
            reference.end(claim.share, rows, True)
            self.place(made, claim.lease)
        else:
            reference.end(claim.share, rows, True)
            self.table.ack(0, claim.lease, as_rows(rows))
            self.consumed.update((claim.consumer, row) for row in rows)
        lease[1] = [row for row in held if row not in rows]
        if not lease[1]:
            self.leases.remove(lease)
            self.is_refused(claim, rows)

    def is_refused(self, claim, rows):
        with pytest.raises(DockError, match="not held"):
            self.table.ack(0, claim.lease, as_rows(rows))

    @rule(data=st.data())
    def release(self, data):
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            self.table.release(0, lease[0].lease)
            self.ended(lease)

    def ended(self, lease):
        """A lease is over, its rows are handed out again."""
        claim, held, _, _ = lease
        self.leases.remove(lease)
        self.world.references[claim.consumer].end(claim.share, held, False)
        self.is_refused(claim, held)

    @rule(seconds=st.sampled_from([LEASE / 2, LEASE]))
    def wait(self, seconds):
        self.now += seconds
        self.table.expire()
        for lease in [lease for lease in self.leases if lease[3] <= self.now]:
            self.ended(lease)

    @rule(data=st.data())
    def run_stage(self, data):
        """One stage does all it can."""
        name = data.draw(st.sampled_from(list(self.spec.consumers)))
        for share in range(self.spec.consumers[name].shares):
            while self.claim_for(name, share, 2):
                self.finish(self.leases[-1], self.leases[-1][1])

    @rule(data=st.data())
    def lose_one(self, data):
        if self.payloads:
            self.lose([data.draw(st.sampled_from(sorted(self.payloads)))])

    @rule(data=st.data())
    def lose_some(self, data):
        if self.payloads:
            self.lose(
                data.draw(st.lists(st.sampled_from(sorted(self.payloads)), min_size=1, max_size=3, unique=True))
            )

    def lose(self, numbers):
        """These payloads are gone. In which order rows that were ready come is not known afterwards."""
        gone = {value for number in numbers for value in self.payloads.pop(number)}
        redone = self.table.lose(numbers).get(0, {})
        expected = self.world.lose(gone)
        assert {name: sorted(rows) for name, rows in redone.items()} == {
            name: sorted(row for unit in units for row in unit) for name, units in expected.items()
        }
        for lease in list(self.leases):
            if not all(self.world.is_sound(key) for key in lease[2] if key[0] in lease[1]):
                self.ended(lease)
        self.exact = self.spec.guarantee_order
        assert self.table.lose(numbers) == {}, "reported twice"

    @rule()
    def restart(self):
        """A new controller takes over a snapshot: what was acknowledged stays so, what was lost stays known."""
        state, payloads = self.table.snapshot()
        self.table = self.new_table()
        self.table.restore(state, payloads)
        self.exact = self.spec.guarantee_order
        for lease in list(self.leases):
            self.ended(lease)

    @invariant()
    def nothing_twice(self):
        if hasattr(self, "world"):
            for reference in self.world.references.values():
                seen = [row for held in reference.out + reference.done for unit in held for row in unit]
                assert len(seen) == len(set(seen))
            assert max(self.consumed.values(), default=1) == 1

    def teardown(self):
        """Whatever happened: with all seeds there, all stages end, and the final ones saw every row once."""
        if not hasattr(self, "world"):
            return
        for lease in list(self.leases):
            self.table.release(0, lease[0].lease)
            self.ended(lease)
        self.supply(range(self.rows))
        for name, consumer in self.spec.consumers.items():  # in the order of the pipeline
            for share in range(consumer.shares):
                while self.claim_for(name, share, 2):
                    self.finish(self.leases[-1], self.leases[-1][1])
                assert self.table.claim(name, 0, self.group, share) is None, f"{name} waits for ever"
        finals = [name for name, consumer in self.spec.consumers.items() if not consumer.puts]
        assert self.consumed == Counter({(name, row): 1 for name in finals for row in range(self.rows)})


TestPipelineMachine = PipelineMachine.TestCase
TestPipelineMachine.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def _pipeline(**kwargs):
    consumers = {
        "make": ConsumerSpec(("seed",), puts=("x",)),
        "join": ConsumerSpec(("x",), grouped=True, puts=("y",)),
        "final": ConsumerSpec(("y",)),
    }
    table = DockTable(DockSpec({c: ColumnSpec("int64") for c in ("seed", "x", "y")}, consumers, **kwargs))
    table.begin(0, 1, 2, 2)
    return table


def _work(table, name, count, column=None):
    """Claim and acknowledge, row by row if results are put; returns the rows, and the payloads put."""
    claim = table.claim(name, 0, count)
    puts = [table.put(0, as_rows([row]), [column], "payload", 8) for row in claim.rows if column]
    table.ack(0, claim.lease)
    return claim.rows, puts


def test_a_group_is_made_again_with_the_rows_that_were_needed_no_more():
    table = _pipeline()
    table.put(0, as_rows([0, 1]), ["seed"], "payload", 8)
    _, (x0, _) = _work(table, "make", 2, "x")
    _, (_, y1) = _work(table, "join", 2, "y")
    assert _work(table, "final", 1)[0] == (0,)
    assert table.lose([x0]) == {0: {}}, "nobody needs it"
    assert table.lose([y1]) == {0: {"make": [0], "join": [0, 1]}}
    assert _work(table, "make", 2, "x")[0] == (0,)
    assert _work(table, "join", 2, "y")[0] == (0, 1)
    assert _work(table, "final", 1)[0] == (1,)
    assert table.claim("final", 0, 1) is None


def test_a_row_that_is_done_is_not_handed_out_again_when_it_gets_values_again():
    table = _pipeline(guarantee_order=False)
    table.put(0, as_rows([0, 1]), ["seed"], "payload", 8)
    _work(table, "make", 2, "x")
    _, (_, y1) = _work(table, "join", 2, "y")
    assert _work(table, "final", 1)[0] == (0,)
    table.lose([y1])
    assert _work(table, "join", 2, "y")[0] == (0, 1)
    assert _work(table, "final", 1)[0] == (1,)
    assert table.claim("final", 0, 1) is None
