"""torch's profiler, where torch itself knows the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity


@contextmanager
def torch_profile(path: Path, shapes: bool, memory: bool, stack: bool) -> Iterator[None]:
    """See `Device.profile`: `<path>.pt.trace.json.gz`, as TensorBoard's profiler and Perfetto read it."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(
        activities=activities, record_shapes=shapes, profile_memory=memory, with_stack=stack
    ) as profile:
        yield
    profile.export_chrome_trace(f"{path}.pt.trace.json.gz")
