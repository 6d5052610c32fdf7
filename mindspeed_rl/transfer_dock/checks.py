"""Arguments of a dock's methods: of the right type and range, or a `DockError` that names argument and value.

They are looked at before anything changes: a number of the wrong type would pass some comparisons and fail later,
when rows are handed out already.
"""

from __future__ import annotations

import math
import threading
from numbers import Integral, Real
from typing import Any

from mindspeed_rl.common.errors import DockError


def integer(name: str, value: Any, least: int | None = None) -> int:
    """The value as an int, numpy's included; truth values are none, nor are fractions without a remainder."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DockError(f"{name} = {value!r:.80}: expected an integer, got {type(value).__name__}")
    if least is not None and value < least:
        raise DockError(f"{name} = {value}: expected at least {least}")
    return int(value)


def seconds(name: str, value: Any, above_zero: bool = False) -> float:
    """A time that can be waited for: every wait has an end."""
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value > threading.TIMEOUT_MAX:
        raise DockError(f"{name} = {value!r:.80}: expected a finite number of seconds")
    if value < 0 or (above_zero and not value):
        raise DockError(f"{name} = {value}: expected {'more than' if above_zero else 'at least'} 0")
    return float(value)


def instance(name: str, value: Any, kind: type) -> None:
    """Raise `DockError` unless the value is of this class."""
    if not isinstance(value, kind):
        raise DockError(f"{name} = {value!r:.80}: expected {kind.__name__}, got {type(value).__name__}")
