"""What a tool is, and where those of users are put."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.common.user_code import run_user_file


class ToolError(Exception):
    """The call failed; the model gets to read the message."""


@dataclass(frozen=True)
class Tool:
    """A function that models may call by name.

    Attributes:
        description: what it does, for the model.
        parameters: JSON schema of its arguments' properties; all are required.
        run: called with these as keywords, in a thread of its own; gives the answer. A `TimeoutError` says that its
            time was over, any other error that the call failed.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[..., str]

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates announce it."""
        parameters = {"type": "object", "properties": dict(self.parameters), "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


_registered: dict[str, Tool] = {}
_loaded: set[str] = set()


def register_tool(
    name: str, description: str, parameters: Mapping[str, Any]
) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Decorator for functions of `tool_file`; see `Tool`."""

    def register(function: Callable[..., str]) -> Callable[..., str]:
        _registered[name] = Tool(name, description, parameters, function)
        return function

    return register


def user_tools(path: str | None) -> dict[str, Tool]:
    """What a user's file, run once in a process, registers.

    Raises:
        ConfigError: it cannot be run, or registers nothing.
    """
    if path is not None and path not in _loaded:
        run_user_file(path, "tool_file", "tools_config.tool_file")
        if not _registered:
            hint = "decorate functions with mindspeed_rl.tools.registry.register_tool"
            raise ConfigError([Violation("tools_config.tool_file", path, "registers no tool", hint)])
        _loaded.add(path)
    return dict(_registered)
