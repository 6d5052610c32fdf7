"""Python files of the user's that a configuration names."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from mindspeed_rl.common.errors import ConfigError, Violation


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
