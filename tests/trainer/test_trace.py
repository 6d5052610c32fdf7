"""The timeline of a run: a valid file at any time, spans on one clock, and sums that are the timing metrics."""

import json
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.common.timing import Span, Timings, stage_seconds
from mindspeed_rl.trainer.trace import Trace


def complete(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_spans_are_of_the_clock_on_the_wall() -> None:
    timings = Timings(iteration=3)
    before = time.time()
    for _ in range(2):
        with timings("update"):
            time.sleep(0.02)
    with timings.waiting("update"):
        time.sleep(0.01)
    first, second, wait = timings.spans
    assert before - 0.01 <= first.start
    assert first.start + first.seconds <= second.start
    assert second.start + second.seconds <= wait.start <= time.time() + 0.01
    assert (first.name, first.iteration, first.kind, wait.kind) == ("update", 3, "stage", "wait")
    assert first.thread == threading.get_native_id()
    assert stage_seconds(timings.spans) == {"update": first.seconds + second.seconds}
    assert 0.04 <= first.seconds + second.seconds < 1


def test_a_block_that_fails_is_recorded_too() -> None:
    timings = Timings(0)
    with pytest.raises(KeyError), timings("update"):
        raise KeyError
    assert [span.name for span in timings.spans] == ["update"]


def remote_span(queue: Any) -> None:
    timings = Timings(0)
    with timings("elsewhere"):
        pass
    queue.put(timings.spans[0])


def test_spans_of_two_processes_compare() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    before = time.time()
    process = context.Process(target=remote_span, args=(queue,))
    process.start()
    span = queue.get(timeout=60)
    process.join()
    assert before - 0.05 <= span.start <= time.time() + 0.05


def test_the_file_is_valid_after_every_write(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    assert complete(tmp_path / "trace.json") == []
    now = time.time()
    trace.add("rank 0", [Span("rollout", 0, now + 1, 0.5, 11), Span("reward", 0, now + 2, 0.5, 11, "wait")])
    assert len(complete(tmp_path / "trace.json")) == 2
    trace.add("reward worker", [])
    trace.add("reward worker", [Span("rule_reward", 1, now + 1, 0.25, 11), Span("adv", 1, now + 1, 0.25, 12)])
    events = complete(tmp_path / "trace.json")  # the run is not over
    assert [(e["name"], e["cat"], e["dur"], e["args"]["step"]) for e in events] == [
        ("rollout", "stage", 5e5, 1),
        ("wait for reward", "wait", 5e5, 1),
        ("rule_reward", "stage", 2.5e5, 2),
        ("adv", "stage", 2.5e5, 2),
    ]
    assert events[0]["ts"] == pytest.approx(1e6, abs=1e5)
    assert len({(e["pid"], e["tid"]) for e in events}) == 3
    names = {
        e["args"]["name"]: e["pid"]
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e["name"] == "process_name"
    }
    assert names == {"rank 0": events[0]["pid"], "reward worker": events[2]["pid"]}
    trace.close()
