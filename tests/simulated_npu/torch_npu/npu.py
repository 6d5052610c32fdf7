"""`torch.npu` of the simulated device: the calls of `mindspeed_rl/device/npu.py`, and what Megatron-core asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from torch_npu.extension import simulated

TOTAL_MEMORY = 64 << 30  # bytes, of an Atlas A2
Event = torch.Event
_asleep = 0  # bytes that are allocated, but that a sleeping rollout engine has given back to the device


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    index = torch.device(device).index
    return current_device() if index is None else index


# ---- devices -------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return int(simulated.device_count())


def current_device() -> int:
    return int(simulated.current_device())


def set_device(device: Any) -> None:
    simulated.set_device(_index(device))


def get_device_name(device: Any = None) -> str:
    return "Ascend910B (simulated)"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Of no generation of CUDA devices."""
    return 0, 0


def get_device_properties(device: Any = None) -> Any:
    return SimpleNamespace(name=get_device_name(device), total_memory=TOTAL_MEMORY)


def synchronize(device: Any = None) -> None:
    """Work is done when a call returns."""


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    before = current_device()
    set_device(chosen)
    try:
        yield
    finally:
        set_device(before)


def _lazy_init() -> None:
    """There is nothing to initialise."""


def _lazy_call(call: Callable[[], None], **_: Any) -> None:
    call()


def _is_in_bad_fork() -> bool:
    return False


# ---- memory --------------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    """Memory is given back at once."""


def memory_allocated(device: Any = None) -> int:
    return int(simulated.memory_allocated(_index(device)))


def max_memory_allocated(device: Any = None) -> int:
    return int(simulated.max_memory_allocated(_index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    simulated.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return TOTAL_MEMORY - memory_allocated(device) + _asleep, TOTAL_MEMORY


def count_as_asleep(nbytes: int) -> None:
    """Of the simulation alone: a rollout engine gives so much back, or takes it again, and stays allocated."""
    global _asleep
    _asleep += nbytes


# ---- random numbers ------------------------------------------------------------------------------------------------


class _Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        found: torch.Generator = simulated.default_generator(index)
        return found

    def __len__(self) -> int:
        return device_count()


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generators[index].manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    default_generators[_index(device)].set_state(state)


# ---- streams -------------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of the current device, or of another."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:  # a stream that exists
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("npu", _index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(chosen: torch.Stream) -> None:
    simulated.set_stream(chosen.device_index, chosen.stream_id)


@contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    before = current_stream(chosen.device_index)
    set_stream(chosen)
    try:
        yield
    finally:
        set_stream(before)


def is_current_stream_capturing() -> bool:
    return False
