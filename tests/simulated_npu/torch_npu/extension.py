"""The compiled part, loaded once in a process."""

from __future__ import annotations

from typing import Any

from torch_npu.build import load

simulated: Any = load()
