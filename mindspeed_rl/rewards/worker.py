"""What runs inside a verifier process. Imports neither torch nor Ray, so that such a process starts fast.

Only numbers and strings go back: exceptions of foreign code may not survive pickling.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import multiprocessing
import numbers
import os
import signal
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from mindspeed_rl.rewards.verifiers import VERIFIERS, RewardSample, Verifier


class Status(str, Enum):
    """How the verification of one sample ended."""

    OK = "ok"
    TIMEOUT = "timeout"  # passed its deadline and was killed
    CRASHED = "crashed"  # took its process down
    ERROR = "error"  # raised, or returned something that is not a number
    NAN = "nan"  # returned NaN or an infinity
    SKIPPED = "skipped"  # not asked for, for rows of this source


class VerifierSpec(NamedTuple):
    """Name of a verifier; for `custom` the Python file and the function in it."""

    name: str
    path: str | None = None
    function: str | None = None


class Outcome(NamedTuple):
    """Status, value (NaN unless ok) and explanation for one sample."""

    status: Status
    value: float = math.nan
    message: str = ""


_verifiers: dict[str, Verifier] = {}
_load_errors: dict[str, str] = {}


def start(specs: list[VerifierSpec]) -> None:
    """Initialise the process: import what the verifiers need before any deadline runs."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # die at once, also within a C call
    threading.Thread(target=_die_with_parent, daemon=True).start()
    for spec in specs:
        function, error = _run_foreign(load, spec)
        if error:
            _load_errors[spec.name] = error
        else:
            _verifiers[spec.name] = function


def load(spec: VerifierSpec) -> Verifier:
    """Import the modules of a verifier, or the file of a custom one.

    Raises:
        AttributeError: the custom file lacks the function.
        TypeError: what has its name cannot be called.
    """
    if spec.path is None:
        registered = VERIFIERS[spec.name]
        for module in registered.needs:
            importlib.import_module(module)
        return registered.score
    module_spec = importlib.util.spec_from_file_location("custom_reward_function", spec.path)
    assert module_spec is not None
    assert module_spec.loader is not None
    custom = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(custom)
    function = getattr(custom, str(spec.function), None)
    if function is None:
        raise AttributeError(f"{spec.path} has no function {spec.function!r}")
    if not callable(function):
        raise TypeError(f"{spec.function!r} in {spec.path} is not a function")
    return lambda sample: function(sample.prompt, sample.response, sample.label, **sample.extra)


def load_errors() -> dict[str, str]:
    """Why verifiers could not be loaded, by name."""
    return _load_errors


def score_chunk(name: str, samples: list[RewardSample], budget: float) -> list[Outcome]:
    """Score samples in turn, stopping early once `budget` seconds are spent; at least one is scored."""
    begin = time.monotonic()
    outcomes = []
    for sample in samples:
        outcomes.append(_score(name, sample))
        if time.monotonic() - begin > budget:
            break
    return outcomes


def _score(name: str, sample: RewardSample) -> Outcome:
    if name in _load_errors:
        return Outcome(Status.ERROR, message=_load_errors[name])
    value, error = _run_foreign(_verifiers[name], sample)
    if error:
        return Outcome(Status.ERROR, message=error)
    if not isinstance(value, numbers.Real):
        return Outcome(Status.ERROR, message=f"returned {value!r:.100}, which is not a number")
    if not math.isfinite(value):
        return Outcome(Status.NAN, message=f"returned {value}")
    return Outcome(Status.OK, float(value))


def _run_foreign(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Result of a call and "", or None and what it raised.

    The one place that catches everything: verifiers may be users' code and raise anything, and the failure of one
    sample must become its status, not the end of the run.
    """
    try:
        return function(*arguments), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return None, f"{type(error).__name__}: {error}"


def _die_with_parent() -> None:
    """A parent killed outright cannot clean up; a verifier that hangs would outlive it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
