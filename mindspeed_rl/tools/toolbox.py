"""The tools of a run, and calls of them that are under way."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.rule import nearest
from mindspeed_rl.config.tools import BUILT_IN, ToolsConfig
from mindspeed_rl.tools.calculator import CALCULATOR
from mindspeed_rl.tools.calls import ToolCall
from mindspeed_rl.tools.python import python_tool
from mindspeed_rl.tools.registry import Tool, user_tools
from mindspeed_rl.tools.search import search_tool


class CallStatus(str, Enum):
    """How a call ended."""

    OK = "ok"
    FAILED = "failed"  # malformed, unknown, or the tool raised an error
    TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class ToolAnswer:
    """What the model gets to read."""

    status: CallStatus
    text: str


def load_tools(cfg: ToolsConfig) -> dict[str, Tool]:
    """The tools of a configuration, by name.

    Raises:
        ConfigError: a name that neither is built in nor registered by the user's file, or that file cannot be run.
    """
    known = {CALCULATOR.name: CALCULATOR, "python": python_tool(cfg.tool_timeout, cfg.python_memory_mib)}
    if cfg.search_url is not None:
        known["search"] = search_tool(cfg.search_url, cfg.tool_timeout)
    known |= user_tools(cfg.tool_file)
    for index, name in enumerate(cfg.tools):
        if name not in known:
            hint = nearest(name, [*BUILT_IN, *known])
            raise ConfigError([Violation(f"tools_config.tools.{index}", name, "no such tool", hint)])
    return {name: known[name] for name in cfg.tools}


class Toolbox:
    """Runs calls, each in a thread, and answers every one by its deadline.

    A call that hangs keeps its thread, and nothing else: it is answered with an error and makes room for others.
    """

    def __init__(self, cfg: ToolsConfig):
        self.cfg, self.tools = cfg, load_tools(cfg)
        self._waiting: deque[tuple[int, ToolCall]] = deque()
        self._deadlines: dict[int, float] = {}  # of calls that run
        self._done: queue.SimpleQueue[tuple[int, ToolAnswer]] = queue.SimpleQueue()
        self._next = 0

    def submit(self, calls: Sequence[ToolCall]) -> list[int]:
        """Have calls run, as soon as there is room; gives the number of each."""
        numbers = range(self._next, self._next + len(calls))
        self._next = numbers.stop
        self._waiting.extend(zip(numbers, calls, strict=True))
        self._start()
        return list(numbers)

    def answers(self, seconds: float) -> dict[int, ToolAnswer]:
        """Those that have come since the last time, by number; waits so long for the first one, at most."""
        found: dict[int, ToolAnswer] = {}
        now = time.monotonic()
        wait = min([seconds, *(deadline - now for deadline in self._deadlines.values())])
        try:
            self._take(self._done.get(timeout=max(wait, 0.0)), found)
            while True:
                self._take(self._done.get_nowait(), found)
        except queue.Empty:
            pass
        now = time.monotonic()
        for number in [number for number, deadline in self._deadlines.items() if deadline <= now]:
            message = f"Error: no answer within {self.cfg.tool_timeout:g} s"
            self._take((number, ToolAnswer(CallStatus.TIMED_OUT, message)), found)
        self._start()
        return found

    def _take(self, done: tuple[int, ToolAnswer], found: dict[int, ToolAnswer]) -> None:
        number, answer = done
        if self._deadlines.pop(number, None) is not None:  # else it was too late
            found[number] = answer

    def _start(self) -> None:
        while self._waiting and len(self._deadlines) < self.cfg.tool_parallel:
            number, call = self._waiting.popleft()
            self._deadlines[number] = time.monotonic() + self.cfg.tool_timeout
            # a daemon: the process need not wait for a call that never ends
            threading.Thread(target=lambda n=number, c=call: self._done.put((n, self.run(c))), daemon=True).start()

    def run(self, call: ToolCall) -> ToolAnswer:
        """The answer to a call, however long it takes."""
        if call.error is not None:
            return ToolAnswer(CallStatus.FAILED, f"Error: {call.error}")
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolAnswer(CallStatus.FAILED, f"Error: there is no tool {call.name!r:.80}")
        if set(call.arguments) != set(tool.parameters):
            message = f"Error: {call.name} takes the arguments {', '.join(tool.parameters) or 'none'}"
            return ToolAnswer(CallStatus.FAILED, message)
        try:
            return ToolAnswer(CallStatus.OK, self._shortened(str(tool.run(**call.arguments))))
        except TimeoutError as error:
            return ToolAnswer(CallStatus.TIMED_OUT, self._shortened(f"Error: {error}"))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # users' tools raise anything: it is the answer
            return ToolAnswer(CallStatus.FAILED, self._shortened(f"Error: {error or type(error).__name__}"))

    def _shortened(self, text: str) -> str:
        limit = self.cfg.max_answer_length
        return text if len(text) <= limit else f"{text[: limit // 2]} … {text[len(text) - (limit - limit // 2) :]}"
