"""Which operations of the training model run in a fused kernel: what the keys may say on each kind of device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_rl.config.schema import MegatronConfig

# The values that make a difference; the first is what null stands for
KERNEL_KEYS: dict[str, dict[str, tuple[bool, ...]]] = {
    "use_flash_attn": {"npu": (True,), "cuda": (True,), "cpu": (True,)},
    "use_fused_rmsnorm": {"npu": (True, False), "cuda": (True,), "cpu": (False,)},
    "use_fused_swiglu": {"npu": (True, False), "cuda": (True, False), "cpu": (False,)},
    "use_fused_rotary_pos_emb": {"npu": (True, False), "cuda": (True,), "cpu": (False,)},
}


def uses_kernel(cfg: MegatronConfig, key: str, device: str) -> bool:
    """Whether what `key` is about runs in a fused kernel on this kind of device."""
    value: bool | None = getattr(cfg, key)
    return KERNEL_KEYS[key][device][0] if value is None else value
