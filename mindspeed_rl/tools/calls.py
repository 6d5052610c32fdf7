"""Calls of tools as models write them (the format of Hermes models and of Qwen).

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them in a turn.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call; with an `error` it is none that can be run."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def find_calls(text: str) -> list[ToolCall]:
    """All calls in the text of a turn, in their order, malformed ones too."""
    return [_call(match[1], bool(match[2])) for match in _CALL.finditer(text)]


def _call(text: str, ends: bool) -> ToolCall:
    if not ends:
        return ToolCall(error="the call has no end, </tool_call>")
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of too many digits
        return ToolCall(error=f"the call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error='a call is an object, {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], error="the arguments are not an object")
    return ToolCall(call["name"], arguments)
