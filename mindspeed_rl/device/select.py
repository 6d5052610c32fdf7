"""Chooses the device of a process: explicitly, by name."""

from __future__ import annotations

from importlib.util import find_spec

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.device.base import Device


def make_device(kind: str, here: bool = True) -> Device:
    """The device named `kind`: npu, cuda or cpu.

    Args:
        kind: which one.
        here: it will be used in this process (False: only its description is wanted, as on a head node).

    Raises:
        ConfigError: `kind` names a device that this process should use and cannot.
    """
    from mindspeed_rl.device.cpu import CpuDevice
    from mindspeed_rl.device.cuda import CudaDevice
    from mindspeed_rl.device.npu import NpuDevice

    kinds: dict[str, type[Device]] = {"npu": NpuDevice, "cuda": CudaDevice, "cpu": CpuDevice}
    device = kinds[kind]()
    if here and not device.available():
        package = {"npu": "torch_npu", "cuda": "torch"}[kind]
        reason = f"package {package} is not installed" if find_spec(package) is None else "no such device is visible"
        raise ConfigError([Violation("device", kind, reason, "choose another device, or auto")])
    return device
