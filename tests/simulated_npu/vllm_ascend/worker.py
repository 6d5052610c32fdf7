"""The worker: the CPU's, with weights that can be loaded in place, and sleep."""

from __future__ import annotations

from typing import Any

import torch
from torch_npu import npu
from vllm import _custom_ops
from vllm.v1.worker.cpu_worker import CPUWorker


class NPUWorker(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # a library would keep weights in an order of its own, which an NPU's parameters do not have
        _custom_ops._supports_onednn = False
        super().load_model(*args, **kwargs)
        self._taken = {"weights": self._account(list(self.model_runner.model.parameters()))}
        self._away: set[str] = set()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        self._taken["kv_cache"] = self._account(self.model_runner.kv_caches)

    @staticmethod
    def _account(tensors: list[torch.Tensor]) -> torch.Tensor:
        """Memory of the NPU that stands for these: taken, and never touched."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return torch.empty(nbytes, dtype=torch.uint8, device="npu")

    def sleep(self, level: int = 1) -> None:
        assert level == 2, "weights that stay on the host are not simulated"
        for tensor in self.model_runner.model.parameters():
            tensor.data.fill_(float("nan"))
        for part in self._taken.keys() - self._away:
            npu.count_as_asleep(len(self._taken[part]))
        self._away = set(self._taken)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for part in self._away & set(tags or self._taken):
            npu.count_as_asleep(-len(self._taken[part]))
            self._away.discard(part)
