"""Processes are killed at random moments: every row is consumed exactly once in a dock's life, or named as lost.

Stages: make: seed -> x, join: x -> y (whole groups), final reads both. An x carries a random tag, and y the same, so
that the final stage notices a y that was made of another x. Consumption is logged in files, which outlive a SIGKILL:
a row begins, is acknowledged, ends. Between the last two nobody but the dock knows.
"""

import contextlib
import os
import random
import re
import signal
import sys
import time
from collections import Counter

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from mindspeed_rl.common.errors import DockError, RowsLost
from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock
from mindspeed_rl.transfer_dock.spec import ColumnSpec, ConsumerSpec, DockSpec

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module
ROWS, GROUP, BLOCK = 64, 2, 16
SPEC = DockSpec(
    {"seed": ColumnSpec("int64", "scalar"), "x": ColumnSpec("int64"), "y": ColumnSpec("int64")},
    {
        "make": ConsumerSpec(("seed",), puts=("x",)),
        "join": ConsumerSpec(("x",), shares=2, grouped=True, puts=("y",)),
        "final": ConsumerSpec(("x", "y"), shares=2),
    },
    lease_seconds=1.0,
)
MOMENTS = (("claim", "after"), ("put", "before"), ("put", "after"), ("ack", "before"), ("ack", "after"))
SCHEDULE_SECONDS = 90.0


class Worker:
    """A process that works for one stage at a time."""

    def __init__(self):
        torch.set_num_threads(1)

    def pid(self):
        return os.getpid()

    def put_seeds(self, dock, iteration, rows):
        dock.put(iteration, rows, {"seed": rows})

    def work(self, dock, iteration, stage, share, log, death=None):
        """Until nothing is left to do; returns why it ended. `death`: (request, before or after it, which one)."""
        client = dock._client
        vars(client).pop("request", None)  # an earlier death that did not come to pass
        if death is not None:
            client.request = dying(client.request, *death)
        try:
            while (claim := dock.claim(stage, iteration, 4, share, timeout=SCHEDULE_SECONDS)) is not None:
                time.sleep(0.01)
                try:
                    self.do(dock, claim, log)
                except RowsLost:
                    continue
                except DockError as error:
                    if "not held" not in str(error):
                        raise
        except DockError as error:
            return str(error)
        return "done"

    def do(self, dock, claim, log):
        got = dock.get(claim, claim.columns)
        if claim.consumer == "make":
            assert tuple(got["seed"].tolist()) == claim.rows
            dock.ack(claim, {"x": [torch.tensor([row, random.getrandbits(30)]) for row in claim.rows]})
        elif claim.consumer == "join":
            dock.ack(claim, {"y": [2 * x for x in got["x"]]})
        else:
            for row, x, y in zip(claim.rows, got["x"], got["y"], strict=True):
                assert x[0] == row
                assert torch.equal(y, 2 * x)
            for sign, act in (("begun", lambda: None), ("ended", lambda: dock.ack(claim))):
                act()
                with open(log, "a") as file:
                    file.write("".join(f"{sign} {row}\n" for row in claim.rows))


def dying(request, method, moment, number):
    """`request` of a client, but the process dies before or after the n-th one of a kind."""
    left = [number]

    def wrapped(name, *arguments, **options):
        left[0] -= name == method
        if name == method and left[0] == 0 and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)  # what it has put is in the object store already
        answer = request(name, *arguments, **options)
        if name == method and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return wrapped


class Pool:
    """Processes started ahead, and a dock that is used again and again, with one iteration a schedule."""

    def __init__(self, size):
        self.size, self.free, self.iteration = size, [], 0
        self.dock = RayTransferDock.create(SPEC, num_cpus=0)
        self.fill()
        ray.get([pid for _, pid in self.free])

    def fill(self):
        while len(self.free) < self.size:
            worker = ray.remote(Worker).options(num_cpus=0).remote()
            self.free.append((worker, worker.pid.remote()))

    def take(self):
        worker = self.free.pop(0)
        self.fill()
        return worker


@pytest.fixture(scope="module")
def pool():
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    yield Pool(8)
    ray.shutdown()


class Schedule:
    """One iteration under faults drawn from a seed."""

    def __init__(self, pool, seed, folder):
        self.pool, self.random, self.folder = pool, random.Random(seed), folder
        self.iteration = pool.iteration = pool.iteration + 1
        self.life, self.snapshot, self.acked_before = 0, None, set()
        self.running = {}  # work in progress -> ((worker, its pid), stage, share)
        self.lost_reports = []
        self.source = ROWS // 2 if self.random.random() < 0.25 else 0  # rows whose seeds a mortal process puts
        self.kill_controller_at = self.random.uniform(0.1, 1.0) if self.random.random() < 0.25 else None
        self.kill_somebody_at = self.random.uniform(0.1, 1.0)
        self.kills_left = self.random.randint(1, 3)
        self.events = []

    @property
    def log(self):
        return self.folder / f"life{self.life}"

    def run(self):
        try:
            self._run()
        except BaseException:
            self.pool.dock = RayTransferDock.create(SPEC, num_cpus=0)  # the next schedule is another test
            raise

    def _run(self):
        dock, start = self.pool.dock, time.monotonic()
        dock.begin(self.iteration, ROWS // GROUP, GROUP, BLOCK)
        dock.put(self.iteration, range(self.source, ROWS), {"seed": range(self.source, ROWS)})
        if self.source:
            seeder, pid = self.pool.take()
            ray.get(seeder.put_seeds.remote(dock, self.iteration, list(range(self.source))))
            os.kill(ray.get(pid), signal.SIGKILL)
        self.start_all()
        unfinished = {0, 1}  # shares of the final stage
        while unfinished:
            assert time.monotonic() < start + SCHEDULE_SECONDS, f"{unfinished} unfinished: {self.events}"
            if self.kill_somebody_at is not None and time.monotonic() > start + self.kill_somebody_at:
                (_, pid), stage, share = self.random.choice(list(self.running.values()))
                with contextlib.suppress(ProcessLookupError):  # it has just died of its own accord
                    os.kill(ray.get(pid), signal.SIGKILL)
                self.kill_somebody_at = None
                self.events.append((stage, share, "killed from outside"))
            if self.kill_controller_at is not None:
                self.snapshot = self.pool.dock.snapshot()
                if time.monotonic() > start + self.kill_controller_at:
                    self.kill_controller()
                    unfinished = {0, 1}
            for done in ray.wait(list(self.running), num_returns=len(self.running), timeout=0.1)[0]:
                unfinished -= self.ended(done)
        self.finish()

    def start_all(self):
        """Two processes for every stage: for the same share, or one for each."""
        for stage, consumer in SPEC.consumers.items():
            for number in range(2):
                self.start(self.pool.take(), stage, number % consumer.shares)

    def start(self, process, stage, share):
        death = None
        if self.kills_left and self.random.random() < 0.5:
            kinds = [moment for moment in MOMENTS if moment[0] != ("put" if stage == "final" else "ack")]
            death = (*self.random.choice(kinds), self.random.randint(1, 5))
            self.kills_left -= 1
            self.events.append((stage, share, death))
        arguments = (self.pool.dock, self.iteration, stage, share, str(self.log), death)
        self.running[process[0].work.remote(*arguments)] = process, stage, share

    def ended(self, work):
        """Somebody died, or ended; returns the share of the final stage that is finished."""
        process, stage, share = self.running.pop(work)
        try:
            reason = ray.get(work)
        except RayActorError:
            self.start(self.pool.take(), stage, share)
            return set()
        if reason == "done" and stage == "final":
            self.pool.free.append(process)
            return {share}
        if "is lost" in reason:
            self.lost_reports.append(reason)
            self.put_again()
        else:
            assert reason == "done" or "controller died" in reason, reason
        self.start(process, stage, share)  # a loss may bring back rows of a stage that was done
        return set()

    def put_again(self):
        assert self.source, "only what the seeder put can be lost for good"
        rows = list(range(self.source))
        with contextlib.suppress(DockError):  # "has it already": the other worker's report came first
            self.pool.dock.put(self.iteration, rows, {"seed": rows})

    def kill_controller(self):
        """All that was acknowledged after the snapshot is done again, in a new dock's life."""
        assert self.snapshot is not None
        up = {pid for (_, pid), *_ in self.running.values() if ray.wait([pid], timeout=0)[0]}
        ray.kill(self.pool.dock._controller)
        self.events.append("controller killed")
        for work, (process, *_) in self.running.items():
            try:  # who is still starting finds out once it is up
                reason = ray.get(work, timeout=20 if process[1] in up else SCHEDULE_SECONDS)
            except RayActorError:
                continue
            assert reason == "done" or "controller died" in reason or "is lost" in reason, reason
            self.pool.free.append(process)
        self.running = {}
        self.check()
        state = self.snapshot.state["iterations"][self.iteration]["progress"]["final"]
        self.acked_before = set(state["acked_by"].nonzero()[0].tolist())
        self.life, self.kill_controller_at = self.life + 1, None
        self.pool.dock = RayTransferDock.create(SPEC, num_cpus=0)
        self.pool.dock.restore(self.snapshot)
        self.start_all()

    def consumed(self):
        """(times each row was begun, times it ended) in this life."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        words = [line.split() for line in lines]
        return tuple(Counter(int(row) for word, row in words if word == sign) for sign in ("begun", "ended"))

    def check(self):
        _, ended = self.consumed()
        assert max(ended.values(), default=1) == 1, f"twice: {ended}; {self.events}"
        assert not self.acked_before & set(ended), "acknowledged in the snapshot, and consumed again"

    def finish(self):
        """Every row was consumed once; others may have begun with it and died, or lost their claim."""
        for share in (0, 1):
            assert self.pool.dock.claim("final", self.iteration, 1, share, timeout=5) is None
        self.check()
        begun, ended = self.consumed()
        assert set(begun) | self.acked_before == set(range(ROWS)), f"silently lost; {self.events}"
        unsure = sum(row not in ended for row in set(range(ROWS)) - self.acked_before)
        deaths = sum(event[0] == "final" for event in self.events)
        assert unsure <= 4 * deaths, "only who dies between the dock's ack and its own log leaves a row like that"
        for report in self.lost_reports:
            assert re.search(r"'seed' of \d+ rows \(\d+.*\) of iteration \d+ is lost", report)
        self.pool.dock.clear(self.iteration)
        with pytest.raises(DockError, match="has been cleared"):
            self.pool.dock.put(self.iteration, [0], {"x": [torch.zeros(2, dtype=torch.int64)]})
        for work, (process, *_) in self.running.items():
            with contextlib.suppress(RayActorError):
                ray.get(work, timeout=SCHEDULE_SECONDS)  # it may be a process that is still starting
                self.pool.free.append(process)


@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_consumed_once_whoever_is_killed(pool, tmp_path, seed):
    Schedule(pool, seed, tmp_path).run()


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(8, 200))
def test_every_row_is_consumed_once_in_many_more_schedules(pool, tmp_path, seed):
    Schedule(pool, seed, tmp_path).run()
