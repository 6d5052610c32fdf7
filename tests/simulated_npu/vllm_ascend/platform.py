"""The platform: the CPU's, which can sleep, with the worker beside this module."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class NPUPlatform(CpuPlatform):
    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = "vllm_ascend.worker.NPUWorker"
