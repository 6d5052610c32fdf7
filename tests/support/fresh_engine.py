"""vLLM with the weights of a Hugging Face folder, as it loads them itself."""

from typing import Any

import torch

from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.engine.vllm.engine import VllmEngine


class FreshlyLoaded(VllmEngine):
    def _arguments(self, model_folder: str, seed: int) -> dict[str, Any]:
        return {**super()._arguments(model_folder, seed), "load_format": "auto"}


def parameters(worker: Any) -> dict[str, torch.Tensor]:
    """This rank's part of vLLM's own weights, as its kernels use them."""
    return {name: tensor.clone() for name, tensor in worker.model_runner.model.named_parameters()}


def fresh_parameters(rank: int, folder: str, infer_tp: int) -> dict[str, torch.Tensor]:
    """On one of the ranks of an engine."""
    cfg = GenerateConfig(infer_tensor_parallel_size=infer_tp, dtype="float32", max_model_len=64)
    engine = FreshlyLoaded(cfg, folder, CpuDevice(), 1, [0])
    found: dict[str, torch.Tensor] = engine.llm.collective_rpc(parameters)[0]
    return found
