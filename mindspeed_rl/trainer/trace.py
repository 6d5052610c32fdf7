"""The timeline of a run, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindspeed_rl.common.timing import Span

_END = b"\n]}\n"


class Trace:
    """Writes spans as complete events of the Trace Event Format (JSON object form); the file is valid at any time.

    Each process of the run is a process of the trace, each of its threads a line. Times are microseconds since the
    trace was opened.

    Args:
        path: file, overwritten if it is there.
    """

    def __init__(self, path: Path):
        self._file = path.open("wb", buffering=0)
        self._file.write(b'{"displayTimeUnit": "ms", "traceEvents": [' + _END)
        self._origin = time.time()
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, int], int] = {}

    def add(self, process: str, spans: Iterable[Span]) -> None:
        """Append a process's spans."""
        events: list[dict[str, Any]] = []
        first = not self._processes
        if process not in self._processes:
            pid = self._processes[process] = len(self._processes)
            events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": process}})
        pid = self._processes[process]
        for span in spans:
            if (process, span.thread) not in self._threads:
                tid = self._threads[process, span.thread] = len(self._threads)
                events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": "stages"}})
            start, tid = span.start - self._origin, self._threads[process, span.thread]
            events.append(
                {
                    "name": span.name if span.kind == "stage" else f"wait for {span.name}",
                    "cat": span.kind,
                    "ph": "X",
                    "ts": 1e6 * start,
                    "dur": 1e6 * span.seconds,
                    "pid": pid,
                    "tid": tid,
                    "args": {"step": span.iteration + 1},
                }
            )
        if events:
            text = ",".join(f"\n{json.dumps(event)}" for event in events)
            self._file.seek(-len(_END), 2)
            self._file.write(("" if first else ",").encode() + text.encode() + _END)  # in one piece

    def close(self) -> None:
        """Close the file."""
        self._file.close()
