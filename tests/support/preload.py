"""What ranks of the tests import, imported once, in the server that they are forked from."""

import os

import torch

from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.engine.megatron.bootstrap import prepare

torch.set_num_threads(1)
device = CpuDevice()
prepare(device, MegatronConfig())
os.environ.update(device.vllm_environment(kv_cache_gib=1, eager=True))  # before vllm is
import vllm.entrypoints.llm  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import mindspeed_rl.engine.megatron.engine  # noqa: E402, F401
