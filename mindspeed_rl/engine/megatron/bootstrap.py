"""Prepares a process for Megatron: the one place for what must happen before it is first imported.

Nothing here imports megatron. MindSpeed takes its arguments from the command line when `mindspeed.megatron_adaptor`
is imported, so it is given one for that time: what follows from our configuration, and nothing of the trainer's own
command. Its `repatch` would come too late for some: MindSpeed adds its arguments to Megatron's configuration classes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from mindspeed_rl.common.errors import ConfigError, SetupError, Violation
from mindspeed_rl.config.kernels import KERNEL_KEYS, uses_kernel
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device

logger = logging.getLogger(__name__)

# MindSpeed has no switch of its own for the attention kernel, and the core attention it would replace is ours
_FORWARDED_KERNELS = tuple(key for key in KERNEL_KEYS if key != "use_flash_attn")

_prepared: tuple[str, tuple[str, ...]] | None = None  # kind of device, and MindSpeed's arguments


def prepare(device: Device, cfg: MegatronConfig) -> None:
    """Adapt this process to `device`, so that Megatron can be imported. A second time alike does nothing.

    Raises:
        ConfigError: MindSpeed, or what a feature of it needs, is not installed.
        SetupError: megatron is imported already, or the process was prepared otherwise, or MindSpeed fails.
    """
    global _prepared
    wanted = (device.name, tuple(mindspeed_arguments(cfg)) if device.name == "npu" else ())
    if _prepared == wanted:
        return
    if _prepared is not None:
        raise SetupError(f"this process is prepared for Megatron as {_prepared}, and cannot be prepared as {wanted}")
    _refuse_early_megatron(device.name)
    device.install()
    if device.name == "npu":
        _apply_mindspeed(cfg, wanted[1])
    _prepared = wanted


def mindspeed_arguments(cfg: MegatronConfig) -> list[str]:
    """What MindSpeed is told, as on a command line.

    Its AdamW is asked for by name: it keeps moments as tensors of their own, one for each weight, which checkpoints
    and offloading rely on (torch_npu's NpuFusedAdamW puts all of them into one), and Megatron finds it as apex's.
    """
    arguments = ["--optimizer-selection", "fused_adamw", "--context-parallel-algo", cfg.context_parallel_algo]
    arguments += [_option(key) for key in _FORWARDED_KERNELS if uses_kernel(cfg, key, "npu")]
    if uses_kernel(cfg, "use_fused_rotary_pos_emb", "npu"):
        arguments += ["--position-embedding-type", "rope"]  # an argument of Megatron's, which MindSpeed asks for here
    if cfg.recompute_activation_function:
        arguments.append(_option("recompute_activation_function"))
    return arguments


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _refuse_early_megatron(kind: str) -> None:
    early = sorted(name for name in sys.modules if name.startswith("megatron."))
    if early:
        raise SetupError(
            f"megatron was imported before this process was prepared for device = {kind!r} (modules: {early[0]} and "
            f"{len(early) - 1} more): what adapts it would come too late. Call "
            "mindspeed_rl.engine.megatron.bootstrap.prepare first, and import megatron after it"
        )


def _apply_mindspeed(cfg: MegatronConfig, arguments: Sequence[str]) -> None:
    if find_spec("mindspeed") is None:
        hint = "install it from its source (requirements/npu.txt says which), or choose another device"
        raise ConfigError([Violation("device", "npu", "package mindspeed is not installed", hint)])
    if cfg.recompute_activation_function and find_spec("megatron.training") is None:
        message = "MindSpeed imports megatron.training for it, which the package megatron-core lacks"
        hint = "put Megatron-LM's source, of the same version, on PYTHONPATH, or set it to false"
        raise ConfigError([Violation("actor_config.recompute_activation_function", True, message, hint)])
    logger.info("MindSpeed's arguments: %s", " ".join(arguments))
    with _command_line(arguments):
        try:
            from mindspeed import megatron_adaptor  # noqa: F401  # importing it applies it
        except ImportError as error:
            hint = "requirements/npu.txt names versions that go together"
            raise SetupError(f"MindSpeed cannot be applied to Megatron: {error} ({hint})") from error


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Inside, this process seems to have been started with these arguments."""
    before = sys.argv
    sys.argv = [*before[:1], *arguments]
    try:
        yield
    finally:
        sys.argv = before
