"""`torch_npu.profiler`: that of torch, with the folder of files that torch_npu writes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch


class ProfilerActivity(Enum):
    CPU = 0
    NPU = 1


def tensorboard_trace_handler(dir_name: str) -> Callable[[Any], None]:
    def write(profile: Any) -> None:
        folder = Path(dir_name)
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / "trace_view.json"))

    return write


class profile(torch.profiler.profile):
    """Activities of the NPU are operators of the CPU here."""

    def __init__(self, *, activities: Any = None, **settings: Any):
        assert set(activities or ()) <= set(ProfilerActivity), activities
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **settings)
