"""What every TransferDock promises, run against the in-process dock and the one over Ray."""

import pickle
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from mindspeed_rl.common.errors import DockError, DockTimeout
from mindspeed_rl.data.packing import balanced_partition
from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.spec import NOT_YET, ColumnSpec, ConsumerSpec, DockSpec

COLUMNS = {
    "prompt": ColumnSpec("int64"),
    "response": ColumnSpec("int64"),
    "log_probs": ColumnSpec("float32"),
    "reward": ColumnSpec("float32", "scalar"),
    "length": ColumnSpec("int64", "scalar"),
    "label": ColumnSpec("object", "object"),
}
CONSUMERS = {
    "rollout": ConsumerSpec(("prompt",), shares=2, grouped=True),
    "reward": ConsumerSpec(("prompt", "response", "label")),
    "advantage": ConsumerSpec(("reward",), grouped=True),
    "update": ConsumerSpec(("prompt", "response", "log_probs", "reward"), shares=2),
}


@pytest.fixture
def make_dock(new_dock):
    def make(consumers=CONSUMERS, **limits):
        return new_dock(DockSpec(COLUMNS, consumers, **{"renew_leases": False, **limits}))

    return make


def prompts(n, samples=2):
    """n prompts, each one tensor object shared by its samples."""
    return [tensor for i in range(n) for tensor in [torch.arange(i, i + 3)] * samples]


def responses(rows):
    return [torch.arange(row, dtype=torch.int64) + 100 * row for row in rows]


def run(work):
    """Run `work` in a thread; returns a function that joins it and gives (result or error, seconds)."""
    outcome = []

    def body():
        start = time.monotonic()
        try:
            outcome.append(work())
        except (DockError, DockTimeout) as error:
            outcome.append(error)
        outcome.append(time.monotonic() - start)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def join():
        thread.join(30)
        assert not thread.is_alive(), "the waiting call did not come back"
        return outcome

    return join


def test_values_come_back_as_they_were_put(make_dock):
    dock = make_dock()
    dock.begin(0, 3, 2, block_rows=6)
    label = {"answer": [1, 2]}
    dock.put(0, range(6), {"prompt": prompts(3), "label": [label, None, "x", 3, label, (4,)]})
    dock.put(0, [4, 5, 0], {"response": responses([4, 5, 0])})
    dock.put(0, [1, 2, 3], {"response": responses([1, 2, 3])})
    dock.put(0, range(6), {"reward": [0.5, 1, -1.0, float("nan"), 2.0, 3.0], "length": torch.arange(6)})
    dock.put(0, range(6), {"log_probs": [torch.full((row,), row / 2) for row in range(6)]})
    claim = dock.claim("reward", 0, 6)
    assert claim.rows == tuple(range(6))
    got = dock.get(claim, ["prompt", "response", "label"])
    assert got["label"] == [label, None, "x", 3, label, (4,)]
    for row in range(6):
        torch.testing.assert_close(got["prompt"][row], prompts(3)[row], rtol=0, atol=0)
        torch.testing.assert_close(got["response"][row], responses([row])[0], rtol=0, atol=0)
    assert got["prompt"][0].data_ptr() == got["prompt"][1].data_ptr(), "a group's prompt is stored once"
    dock.ack(claim)
    assert dock.claim("reward", 0, 6) is None
    for share in range(2):
        claim = dock.claim("update", 0, 6, share)
        assert claim.rows == tuple(range(3 * share, 3 * share + 3))
        got = dock.get(claim, ["reward", "log_probs"])
        expected = torch.tensor([0.5, 1, -1, float("nan"), 2, 3])[3 * share : 3 * share + 3]
        torch.testing.assert_close(got["reward"], expected, equal_nan=True, rtol=0, atol=0)
        assert [values.tolist() for values in got["log_probs"]] == [[row / 2] * row for row in claim.rows]
    with pytest.raises(DockError, match="'label' is not among"):
        dock.get(claim, ["label"])


def test_the_dock_does_not_see_later_writes_of_the_producer(make_dock):
    dock = make_dock()
    dock.begin(0, 1, 1, 1)
    reward, prompt = torch.tensor([1.0]), torch.tensor([1, 2])
    dock.put(0, [0], {"reward": reward, "prompt": [prompt], "response": [prompt[:1]], "log_probs": [torch.ones(1)]})
    reward.zero_(), prompt.zero_()
    got = dock.get(dock.claim("update", 0, 1, 1), ["reward", "prompt"])
    assert (got["reward"].tolist(), got["prompt"][0].tolist()) == ([1.0], [1, 2])


def test_objects_may_come_from_a_sequence_that_makes_them_when_asked(make_dock):
    dock = make_dock()
    dock.begin(0, 6, 1, 6)
    parts = [(torch.arange(6) + 10 * run, np.array([0, 2, 4, 6]), np.arange(3)) for run in range(2)]
    dock.put(0, range(6), {"label": Jagged.joined(parts), "prompt": prompts(6, 1), "response": responses(range(6))})
    labels = dock.get(dock.claim("reward", 0, 6), ["label"])["label"]
    assert [label.tolist() for label in labels] == [[0, 1], [2, 3], [4, 5], [10, 11], [12, 13], [14, 15]]


def test_another_docks_claim_does_not_change_what_is_read(make_dock):
    docks, claims = [make_dock(), make_dock()], []
    for number, dock in enumerate(docks):
        dock.begin(0, 1, 2, 2)
        dock.put(0, [0, 1], {"prompt": [torch.tensor([number])] * 2})
        claims.append(dock.claim("rollout", 0, 2, share=1))
    read = [docks[0].get(claims[number], ["prompt"])["prompt"][0].tolist() for number in (0, 1, 0)]
    assert read == [[0], [1], [0]]


def test_order_blocks_and_shares(make_dock):
    dock = make_dock()
    order = [6, 7, 2, 3, 0, 1, 4, 5]
    dock.begin(0, 4, 2, block_rows=4, orders={"update": order})
    dock.put(0, range(8), {"prompt": prompts(4), "response": responses(range(8)), "reward": [0.0] * 8})
    dock.put(0, range(1, 8), {"log_probs": [torch.ones(1)] * 7})
    first = dock.claim("update", 0, 100, share=0)
    assert first.rows == (6, 7), "share 0's half of the first block; a claim ends with its block"
    assert dock.try_claim("update", 0, 2, share=0) is NOT_YET, "row 0 is not ready: row 1 must not overtake it"
    assert dock.claim("update", 0, 1, share=1).rows == (2,)
    assert dock.claim("update", 0, 2, share=1).rows == (3,)
    dock.put(0, [0], {"log_probs": [torch.ones(1)]})
    assert dock.claim("update", 0, 2, share=0).rows == (0, 1)
    assert dock.claim("update", 0, 2, share=1).rows == (4, 5)


def test_without_order_ready_groups_come_first(make_dock):
    dock = make_dock(guarantee_order=False)
    dock.begin(0, 3, 2, block_rows=6)
    dock.put(0, [5, 2, 1], {"reward": [0.0] * 3})
    assert dock.try_claim("advantage", 0, 2) is NOT_YET
    dock.put(0, [4], {"reward": [0.0]})
    assert dock.claim("advantage", 0, 2).rows == (4, 5)
    dock.put(0, [0, 3], {"reward": [0.0] * 2})
    assert dock.claim("advantage", 0, 4).rows == (0, 1, 2, 3)


def test_claims_of_a_grouped_consumer_count_whole_groups(make_dock):
    dock = make_dock()
    dock.begin(0, 2, 2, 4)
    with pytest.raises(DockError, match="count = 3 rows: expected a multiple of n_samples = 2"):
        dock.claim("rollout", 0, 3)


def test_a_waiting_claim_wakes_up_with_the_last_missing_value(make_dock):
    dock = make_dock()
    dock.begin(0, 2, 2, 4)
    joins = [run(lambda share=share: dock.claim("rollout", 0, 2, share, timeout=20)) for share in range(2)]
    time.sleep(0.3)
    dock.put(0, [2, 3], {"prompt": prompts(2)[2:]})
    assert joins[1]()[0].rows == (2, 3)
    dock.put(0, [0], {"prompt": prompts(1)[:1]})
    dock.put(0, [1], {"prompt": prompts(1)[:1]})
    claim, seconds = joins[0]()
    assert claim.rows == (0, 1)
    assert seconds < 10
    assert dock.stats()["wait_seconds"]["rollout"] > 0.5


def test_the_last_claim_waits_for_rows_that_others_hold(make_dock):
    dock = make_dock()
    dock.begin(0, 2, 1, 2)
    dock.put(0, [0, 1], {"reward": [0.0, 1.0]})
    held = dock.claim("advantage", 0, 2)
    assert dock.try_claim("advantage", 0, 1) is NOT_YET
    join = run(lambda: dock.claim("advantage", 0, 1, timeout=20))
    time.sleep(0.2)
    dock.ack(held)
    assert join()[0] is None
    assert dock.try_claim("advantage", 0, 1) is None


def test_leases_expire_and_end_once(make_dock):
    dock = make_dock(lease_seconds=0.5)
    dock.begin(0, 2, 1, 2)
    dock.put(0, [0, 1], {"reward": [0.0, 1.0]})
    lost = dock.claim("advantage", 0, 1)
    released = dock.claim("advantage", 0, 1)
    dock.release(released)
    assert dock.claim("advantage", 0, 1).rows == (1,)
    claim, seconds = run(lambda: dock.claim("advantage", 0, 1, timeout=20))()
    assert claim.rows == (0,)
    assert 0.1 < seconds < 5
    for finish in (dock.ack, dock.release):
        for ended in (lost, released):
            with pytest.raises(DockError, match="not held"):
                finish(ended)
    dock.ack(claim)
    with pytest.raises(DockError, match="not held"):
        dock.ack(claim)


def test_an_ack_after_expiry_is_refused_even_if_nobody_asked_for_the_rows(make_dock):
    dock = make_dock(lease_seconds=0.2)
    dock.begin(0, 1, 1, 1)
    dock.put(0, [0], {"reward": [0.0]})
    claim = dock.claim("advantage", 0, 1)
    time.sleep(0.4)
    with pytest.raises(DockError, match=r"given back: after 0.2 s"):
        dock.ack(claim)


def test_results_after_expiry_are_refused_as_such_if_somebody_else_was_faster(make_dock):
    """Whoever holds a lease that has ended learns that, not that the values are there already."""
    dock = make_dock(lease_seconds=0.5)
    dock.begin(0, 1, 1, 1)
    dock.put(0, [0], {"reward": [0.0]})
    late = dock.claim("advantage", 0, 1)
    dock.ack(dock.claim("advantage", 0, 1, timeout=20), {"length": [1]})
    with pytest.raises(DockError, match="not held"):
        dock.ack(late, {"length": [2]})


def get_until_freed(dock, claim):
    """Memory is freed in the background: until then the values may still come."""
    for _ in range(50):
        assert dock.get(claim, ["prompt"])["prompt"][0].tolist() == [0, 1, 2]
        dock._reader.forget(lambda _: True)
        time.sleep(0.1)


def test_a_cleared_iteration_refuses_everything(make_dock):
    dock = make_dock()
    for iteration in (3, 4):
        dock.begin(iteration, 1, 2, 2)
        dock.put(iteration, [0, 1], {"prompt": prompts(1)})
    held = dock.claim("rollout", 3, 2, share=1)
    join = run(lambda: dock.claim("reward", 3, 2, timeout=20))
    time.sleep(0.2)
    dock.clear(3)
    assert "iteration 3 has been cleared" in str(join()[0])
    for late in (
        lambda: dock.put(3, [0], {"reward": [1.0]}),
        lambda: dock.claim("rollout", 3, 2),
        lambda: dock.try_claim("rollout", 3, 2),
        lambda: dock.ack(held),
        lambda: dock.clear(3),
    ):
        with pytest.raises(DockError, match="iteration 3 has been cleared"):
            late()
    with pytest.raises(DockError, match="begun before"):
        dock.begin(3, 1, 2, 2)
    with pytest.raises(DockError, match="cleared"):
        get_until_freed(dock, held)
    with pytest.raises(DockError, match="iteration 7 has not been begun"):
        dock.claim("reward", 7, 1)
    assert dock.stats()["rows"] == {4: 2}
    assert dock.claim("rollout", 4, 2, share=1).rows == (0, 1)


ONE = torch.ones(1, dtype=torch.int64)
BAD_PUTS = {
    "unknown column 'speed'": ([0], {"speed": [1.0]}),
    "no columns given": ([0], {}),
    "column 'reward' has 1 values for 2 rows": ([0, 1], {"reward": [1.0]}),
    "row 4 is outside iteration 0, which has 4 rows": ([3, 4], {"reward": [1.0, 2.0]}),
    "row -1 is outside": ([-1], {"reward": [1.0]}),
    "expected one or more row numbers": ([], {"reward": []}),
    "a row occurs twice": ([1, 1], {"reward": [1.0, 2.0]}),
    "row 2 of iteration 0 has column 'length' already": ([1, 2], {"reward": [1.0, 2.0], "length": [1, 2]}),
    "'response', row 1: expected a 1-D int64 tensor, got float32": ([0, 1], {"response": [ONE, torch.ones(2)]}),
    r"expected a 1-D int64 tensor, got int64 of shape \(1, 1\)": ([0], {"response": [ONE[None]]}),
    "expected a 1-D float32 tensor, got list": ([0], {"log_probs": [[1.0]]}),
    "'length', row 1: expected a number .int64., got float 0.5": ([0, 1], {"length": [1, 0.5]}),
    "'reward', row 0: expected a number .float32., got bool True": ([0], {"reward": [True]}),
    "'reward', row 0: expected a number .float32., got str": ([0], {"reward": ["1.0"]}),
    "'reward': expected one 1-D float32 tensor, got int64": ([0], {"reward": ONE}),
    "'reward': expected a sequence of one value a row, got float 1.0": ([0], {"reward": 1.0}),
    "'reward': expected a sequence of one value a row, got float32 of": ([0], {"reward": torch.tensor(1.0)}),
    "'label': expected a sequence of one value a row, got str 'x'": ([0], {"label": "x"}),
    "'label': expected a sequence of one value a row, got dict": ([0], {"label": {"answer": 1}}),
    "'reward', row 0: expected a number .float32., got bfloat16": ([0], {"reward": [torch.ones(()).bfloat16()]}),
    "'length', row 0: expected a number .int64., got list": ([0], {"length": [[1, [2]]]}),
    "columns of a put = .'reward'.: expected Mapping, got list": ([0], ["reward"]),
    r"rows = \[\[0\], \[1, 2\]\]: expected one or more row numbers": ([[0], [1, 2]], {"reward": [1.0]}),
    "'label', row 1: function .* cannot be pickled": ([0, 1], {"reward": [1.0, 1.0], "label": [0, lambda: 0]}),
}


def test_a_bad_put_is_refused_and_leaves_nothing(make_dock):
    dock = make_dock(guarantee_order=False)
    dock.begin(0, 4, 1, 4)
    dock.put(0, [2], {"length": [7]})
    before = dock.stats()
    for message, (rows, columns) in BAD_PUTS.items():
        with pytest.raises(DockError, match=message):
            dock.put(0, rows, columns)
    assert dock.stats() == before
    assert dock.try_claim("advantage", 0, 1) is NOT_YET
    dock.put(0, range(4), {"reward": [1.0] * 4})


@pytest.mark.parametrize("keep_order", [True, False])
def test_a_timeout_says_what_was_missing(make_dock, keep_order):
    dock = make_dock(guarantee_order=keep_order)
    dock.begin(0, 8, 1, 8)
    dock.put(0, range(8), {"prompt": prompts(8, 1)})
    dock.put(0, [1], {"label": ["x"]})
    with pytest.raises(DockTimeout) as caught:
        dock.claim("reward", 0, 8, timeout=0.2)
    waited, _, what = str(caught.value).partition("consumer 'reward' share 0 of 1 waited ")[2].partition(" s for ")
    assert float(waited) >= 0.2
    assert what.startswith("8 rows of iteration 0: row 0 lacks response, label; row 1 lacks response; row 2 lacks")
    assert "and 4 more rows" in what
    held = dock.claim("rollout", 0, 2)
    dock.claim("rollout", 0, 2)
    with pytest.raises(DockTimeout, match=rf"4 rows are out under a lease \({held.rows[0]}, "):
        dock.claim("rollout", 0, 1, timeout=0.1)
    assert dock.stats()["wait_seconds"]["reward"] >= 0.2
    dock.release(held)  # the calls that gave up hold nothing
    assert dock.claim("rollout", 0, 4, timeout=5).rows == held.rows


def test_arguments_of_a_claim_are_checked(make_dock):
    dock = make_dock()
    dock.begin(0, 1, 1, 1)
    with pytest.raises(DockError, match="unknown consumer 'critic'"):
        dock.claim("critic", 0, 1)
    with pytest.raises(DockError, match="'update' has no share 2: it has 2"):
        dock.claim("update", 0, 1, share=2)
    with pytest.raises(DockError, match="count = 0 rows"):
        dock.claim("update", 0, 0)
    for timeout in (None, "1", float("nan"), float("inf"), 1e300, -1, True):
        with pytest.raises(DockError, match=r"timeout = .*: expected (a finite number|at least 0)"):
            dock.claim("update", 0, 1, timeout=timeout)
        with pytest.raises(DockError, match=r"timeout = .*: expected (a finite number|at least 0)"):
            dock.put(0, [0], {"length": [1]}, timeout=timeout)
    for nothing in (NOT_YET, None):
        for call in (dock.ack, dock.release, lambda claim: dock.get(claim, ["prompt"])):
            with pytest.raises(DockError, match=r"claim = .*: expected Claim, got No"):
                call(nothing)
    with pytest.raises(DockError, match="snapshot = 3: expected DockSnapshot, got int"):
        dock.restore(3)


def test_back_pressure_holds_back_later_iterations_only(make_dock):
    dock = make_dock(max_bytes=1000)
    for iteration in (0, 1):
        dock.begin(iteration, 4, 1, 4)
    big = {"response": [torch.zeros(100, dtype=torch.int64)]}
    dock.put(0, [0], big)
    dock.put(1, [0], big)
    dock.put(0, [1], big)  # beyond the limit, but the oldest iteration must be able to end
    with pytest.raises(DockTimeout, match="the limit is 1000; memory is freed when iteration 0 is cleared"):
        dock.put(1, [1], big, timeout=0.2)
    join = run(lambda: dock.put(1, [1], big, timeout=20))
    time.sleep(0.2)
    assert dock.stats()["bytes"] == 3 * 808
    dock.clear(0)
    assert join()[0] is None
    assert dock.stats()["bytes"] == 2 * 808
    assert dock.stats()["bytes_put"] == 4 * 808


@pytest.mark.parametrize(
    ("before", "after", "guarantee_order", "balanced"),
    [(2, 1, True, False), (2, 4, False, False), (1, 4, True, True), (4, 2, True, True), (2, 1, True, True)],
)
def test_a_snapshot_goes_on_with_other_numbers_of_shares(make_dock, before, after, guarantee_order, balanced):
    """As when a run goes on with another layout: what is done stays done, all else is handed out once."""

    def make(shares):
        balance = ("prompt", "response") if balanced and shares > 1 else ()
        consumers = {**CONSUMERS, "update": replace(CONSUMERS["update"], shares=shares, balance=balance)}
        return make_dock(consumers, guarantee_order=guarantee_order, partition=balanced_partition)

    dock = make(before)
    dock.begin(0, 8, 1, 4)
    texts = {"prompt": prompts(8, 1), "response": responses(range(8)), "label": list("abcdefgh")}
    dock.put(0, range(8), {**texts, "reward": [0.0] * 8, "log_probs": [torch.zeros(row) for row in range(8)]})
    done = [dock.claim("update", 0, 1, share=share) for share in (0, before - 1, before - 1)]
    for claim in done:
        dock.ack(claim)
    dock.claim("update", 0, 1)  # nobody acknowledges it
    snapshot = pickle.loads(pickle.dumps(dock.snapshot()))
    dock.clear(0)

    dock = make(after)
    dock.restore(snapshot)
    rows = [row for claim in done for row in claim.rows]
    for share in range(after):
        while (claim := dock.claim("update", 0, 1, share=share)) is not None:
            rows += claim.rows
            dock.ack(claim)
    assert sorted(rows) == list(range(8))


def test_a_snapshot_restores_into_a_new_dock(make_dock):
    dock = make_dock()
    dock.begin(0, 1, 1, 1)
    dock.clear(0)
    dock.begin(1, 4, 1, 2, orders={"advantage": [3, 2, 1, 0]})
    dock.put(1, range(4), {"reward": [0.0, 1.0, 2.0, 3.0], "label": list("abcd"), "prompt": prompts(4, 1)})
    dock.ack(dock.claim("advantage", 1, 1))
    out = dock.claim("advantage", 1, 1)
    snapshot = pickle.loads(pickle.dumps(dock.snapshot()))
    dock.ack(out)  # after the snapshot: will be handed out again
    dock.clear(1)

    dock = make_dock()
    dock.restore(snapshot)
    with pytest.raises(DockError, match="not held"):
        dock.ack(out)
    with pytest.raises(DockError, match="iteration 0 has been cleared"):
        dock.put(0, [0], {"reward": [0.0]})
    dock.put(1, range(4), {"response": responses(range(4))})
    claim = dock.claim("advantage", 1, 4)
    assert claim.rows == (2,)
    assert dock.get(claim, ["reward"])["reward"].tolist() == [2.0]
    assert dock.claim("advantage", 1, 4).rows == (1, 0)
    got = dock.get(dock.claim("reward", 1, 2), ["label", "response"])
    assert got["label"] == ["a", "b"]
    assert got["response"][1].tolist() == [100]


@pytest.mark.parametrize("keep_order", [False, True])
def test_many_producers_and_consumers_see_every_row_once(make_dock, keep_order):
    dock = make_dock(guarantee_order=keep_order)
    rows = 40
    dock.begin(0, rows // 2, 2, 8)
    dock.put(0, range(rows), {"prompt": prompts(rows // 2), "log_probs": [torch.ones(1)] * rows})
    seen = {("update", 0): [], ("update", 1): [], ("reward", 0): [], ("reward", 1): []}

    def produce(part):
        for row in part:
            dock.put(0, [int(row)], {"response": responses([int(row)]), "label": [int(row)]})
            dock.put(0, [int(row)], {"reward": [float(row)]})

    def consume(consumer, share, column, number=0):
        while (claim := dock.claim(consumer, 0, 3, share, timeout=25)) is not None:
            got = dock.get(claim, ["response", column])
            assert [values.tolist() for values in got["response"]] == [r.tolist() for r in responses(claim.rows)]
            seen[consumer, share or number] += [int(value) for value in got[column]]
            dock.ack(claim)

    parts = np.array_split(np.random.default_rng(0).permutation(rows), 3)
    work = [lambda part=part: produce(part) for part in parts]
    work += [lambda share=share: consume("update", share, "reward") for share in (0, 1)]
    work += [lambda number=number: consume("reward", 0, "label", number) for number in (0, 1)]
    for join in [run(one) for one in work]:
        assert join()[0] is None
    for consumer in ("update", "reward"):
        assert sorted(seen[consumer, 0] + seen[consumer, 1]) == list(range(rows))
    if keep_order:  # whoever comes first
        assert all(rows_of == sorted(rows_of) for rows_of in seen.values())
        halves = [[row for row in range(rows) if row % 8 // 4 == share] for share in (0, 1)]
        assert [seen["update", share] for share in (0, 1)] == halves


def test_packed_values_are_taken_as_they_lie(make_dock):
    dock = make_dock()
    dock.begin(0, 2, 2, 4)
    flat = torch.arange(7)
    dock.put(
        0,
        range(4),
        {
            "prompt": Jagged(torch.tensor([5, 6, 7]), [1, 2], pieces=[0, 0, 1, 1]),
            "response": Jagged(flat, [3, 0, 2, 2]),
            "label": [None] * 4,
        },
    )
    flat.zero_()
    got = dock.get(dock.claim("reward", 0, 4), ["prompt", "response"])
    assert isinstance(got["response"], Jagged)
    assert [values.tolist() for values in got["prompt"]] == [[5], [5], [6, 7], [6, 7]]
    assert [values.tolist() for values in got["response"]] == [[0, 1, 2], [], [3, 4], [5, 6]]
    with pytest.raises(DockError, match=r"column 'log_probs': expected float32 values, got torch\.int64"):
        dock.put(0, range(4), {"log_probs": Jagged(flat, [3, 0, 2, 2])})


def test_a_lease_lives_as_long_as_its_process(make_dock):
    dock = make_dock(renew_leases=True, lease_seconds=0.6)
    dock.begin(0, 1, 1, 1)
    dock.put(0, [0], {"reward": [1.0]})
    claim = dock.claim("advantage", 0, 1)
    time.sleep(1.5)
    assert dock.try_claim("advantage", 0, 1) is NOT_YET
    dock.ack(claim)
