"""Named functions that configuration values select."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from mindspeed_rl.common.user_code import run_user_file

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind by name; `key` is the configuration key that selects one, for error messages."""

    def __init__(self, key: str):
        self.key = key
        self._functions: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator: make a function selectable under `names` (the first is the main one, the others aliases).

        Raises:
            ValueError: a name is taken.
        """

        def decorate(function: F) -> F:
            for name in names:
                if name in self._functions:
                    raise ValueError(f"{self.key} = {name!r} is registered already")
                self._functions[name] = function
            return function

        return decorate

    def names(self) -> list[str]:
        """Registered names in order of registration."""
        return list(self._functions)

    def __getitem__(self, name: str) -> F:
        """The function of that name.

        Raises:
            ValueError: there is none; names the key, the value, the nearest name and all names.
        """
        if name in self._functions:
            return self._functions[name]
        near = difflib.get_close_matches(name, self._functions, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{self.key} = {name!r} is unknown; {hint}known: {', '.join(self._functions)}")


_loaded: set[str] = set()


def load_custom_algorithms(path: str | None) -> None:
    """Run a user's file, once in a process, which registers what it defines.

    Raises:
        ConfigError: it raises an error, such as for a name that is taken.
    """
    if path is None or str(Path(path).resolve()) in _loaded:
        return
    run_user_file(path, "custom_algorithms", "rl_config.custom_algorithm_file")
    _loaded.add(str(Path(path).resolve()))
