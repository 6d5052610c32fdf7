"""What was done when: spans of time by name, comparable across processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

# wall-clock time that never goes back: one look at the wall clock, and a steady clock from there on
_EPOCH = time.time() - time.perf_counter()


@dataclass(frozen=True)
class Span:
    """A stretch of work, or of waiting for it, in one thread."""

    name: str
    iteration: int
    start: float  # seconds since 1970
    seconds: float
    thread: int  # the operating system's number of it
    kind: Literal["stage", "wait"] = "stage"


class Timings:
    """`with timings("rollout"): …` records the block as a span. Blocks of one thread must not contain each other.

    Args:
        iteration: that the spans belong to.
    """

    def __init__(self, iteration: int):
        self.iteration = iteration
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, name: str, kind: Literal["stage", "wait"] = "stage") -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            thread = threading.get_native_id()
            self.spans.append(Span(name, self.iteration, _EPOCH + start, seconds, thread, kind))

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """As a call; time spent waiting for others, which is no stage's."""
        return self(name, "wait")


def stage_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by stage; waits are left out."""
    seconds: dict[str, float] = {}
    for span in spans:
        if span.kind == "stage":
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    return seconds
