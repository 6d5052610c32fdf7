"""A simulated NPU under the names of torch_npu, for tests where there is no Ascend device.

What is real, what is simulated, and what is missing:

- torch knows the device by its open registration (PrivateUse1), under the name `npu`: tensors, autograd, storages,
  generators, streams, memory figures and hooks are those of an accelerator, and it refuses to mix them with others.
- Arithmetic is the CPU's, on the same memory (`simulated.cpp`). Streams and events are in name only: work is done
  when a call returns, so a missing wait is not seen here.
- Fused operators are computed from torch's own, with the checks that their documentation states (`operators.py`).
- `hccl` takes tensors of the NPU alone, and hands their memory to gloo.
- Offered is what `mindspeed_rl/device/npu.py` and the adaptor beside this package (`mindspeed`) call, and no more.

The variable `SIMULATED_NPUS` says how many devices the host has; `ASCEND_RT_VISIBLE_DEVICES` narrows them.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_npu import npu, operators, profiler
from torch_npu.extension import simulated

npu_fusion_attention = operators.npu_fusion_attention
npu_rms_norm = operators.npu_rms_norm
npu_rotary_mul = operators.npu_rotary_mul
npu_swiglu = operators.npu_swiglu

__all__ = ["npu", "npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu", "profiler"]


def _hccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    return simulated.hccl(gloo)


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
sys.modules["torch.npu"] = npu
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("hccl", _hccl, devices=["npu"])
