"""Python files of the user's that a configuration names."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from mindspeed_rl.common.errors import ConfigError, DataError, Violation


def run_user_file(path: str, module_name: str, key: str) -> ModuleType:
    """Run a file as a module of that name.

    Args:
        path: the file.
        module_name: its name among the process's modules; one of the same name is replaced.
        key: the configuration's, for messages.

    Raises:
        ConfigError: it is no Python file, or raises an error.
    """
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError([Violation(key, path, "is no Python file", "call it ….py")])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their types up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError([Violation(key, path, f"raised {type(error).__name__}: {error}")]) from error
    return module


def user_class(path: str, name: str, key: str) -> type:
    """A class in a user's file; `key` is the configuration's section of both.

    Raises:
        ConfigError: the file cannot be run, or has no such class.
    """
    module = run_user_file(path, key.rpartition(".")[2], f"{key}.path")
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        classes = sorted(name for name, value in vars(module).items() if isinstance(value, type))
        raise ConfigError([Violation(f"{key}.name", name, f"is no class in {path}", f"it has {classes}")])
    return kind


def call_user(key: str, what: str, function: Any, *arguments: Any) -> Any:
    """What a user's function gives.

    Raises:
        DataError: it raises an error; named by the configuration's key and as `what`.
    """
    try:
        return function(*arguments)
    except Exception as error:  # whatever the user's code may raise
        setting = key.rpartition(".")[2]
        raise DataError(f"{setting}: {what} raised {type(error).__name__}: {error}") from error
