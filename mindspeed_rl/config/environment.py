"""Environment variables of a run's processes: the keys of `runtime_env`, and what is known of some variables.

Names, values and ranges are those of Ascend's references of environment variables (HCCL, CANN 8.5; torch_npu 2.7.1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints

from mindspeed_rl.config.section import Section


def _as_text(value: Any) -> Any:
    """Numbers as YAML has them; a truth value could mean true, True or 1."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("should be text or a number; put the text that the variable is to have in quotes")
    return str(value)


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Value = Annotated[str, BeforeValidator(_as_text)]


class RuntimeEnvConfig(Section):
    """Keys of `runtime_env`."""

    env_vars: dict[Name, Value] = Field(
        {}, description="environment variables of every process that the run starts, by name (see below)"
    )


@dataclass(frozen=True)
class Variable:
    """What is known of a variable: its values, in words and as a pattern, or as a range of numbers."""

    meaning: str
    values: str
    pattern: str
    least: float | None = None  # of numbers
    most: float = float("inf")

    def accepts(self, value: str) -> bool:
        """True for a value that has a meaning."""
        if not re.fullmatch(self.pattern, value, re.IGNORECASE):
            return False
        return self.least is None or self.least <= float(value) <= self.most


def _whole(meaning: str, least: int, most: int | None = None) -> Variable:
    values = f"whole number ≥ {least}" if most is None else f"whole number from {least} to {most}"
    return Variable(meaning, values, r"\d+", least, float("inf") if most is None else most)


def _one_of(meaning: str, *values: str) -> Variable:
    return Variable(meaning, " or ".join(f"`{value}`" for value in values), "|".join(values))


# They act on device: npu only
NPU_VARIABLES = {
    "HCCL_BUFFSIZE": _whole("MiB of a buffer for collectives; each process group takes two of them", 1),
    "HCCL_CONNECT_TIMEOUT": _whole("seconds that ranks wait for each other to make a process group", 120, 7200),
    "HCCL_EXEC_TIMEOUT": Variable(
        "seconds that a rank waits for the others within a collective; 0: for ever",
        "number from 0 to 2147483647",
        r"\d+(\.\d+)?",
        0,
        2147483647,
    ),
    "HCCL_IF_BASE_PORT": _whole("first of the ports that HCCL takes on a host", 1024, 65520),
    "TASK_QUEUE_ENABLE": _one_of("how much of an operator's launch is queued for a second thread", "0", "1", "2"),
    "ASCEND_LAUNCH_BLOCKING": _one_of("1: every operator is waited for; switches the task queue off", "0", "1"),
    "PYTORCH_NPU_ALLOC_CONF": Variable(
        "settings of torch_npu's memory allocator",
        "`option:value`, several with commas between",
        r"\w+:[\w.]+(,\w+:[\w.]+)*",
    ),
    "CPU_AFFINITY_CONF": Variable(
        "binds threads to cores: 0 none, 1 a range for each NPU, 2 a core for each busy thread",
        "`0`, `1` or `2`, with options after commas",
        r"(mode:)?[012](,\w+:[\w-]+)*",
    ),
    "HCCL_DETERMINISTIC": _one_of("reducing collectives give the same result each time", "false", "true", "strict"),
    "LCCL_DETERMINISTIC": _one_of("the same for LCCL, which collectives within a host may use", "0", "1"),
    "ATB_MATMUL_SHUFFLE_K_ENABLE": _one_of("ATB's products add up in an order that differs by core", "0", "1"),
    "ATB_LLM_LCOC_ENABLE": _one_of("ATB overlaps products with collectives", "0", "1"),
    "CLOSE_MATMUL_K_SHIFT": _one_of("1: products add up in the same order on every core", "0", "1"),
}

# What npu_deterministic: true sets: MindSpeed's own switch sets the first and last, the others are for vLLM-Ascend
DETERMINISTIC = {
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
    "CLOSE_MATMUL_K_SHIFT": "1",
}

# vLLM's memory pool, from which a sleeping engine gives memory back, stops where this option is on
ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = re.compile(r"expandable_segments:true", re.IGNORECASE)

_PLACE = "tells a worker its place among the ranks"
_VISIBLE = "Ray shows each worker its own device"
_MEMORY = "generate_config.cpu_kv_cache_gib is the key for it"

# Variables that the trainer sets itself, and why
TRAINERS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "Megatron and MindSpeed need the value 1",
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"), _PLACE),
    **dict.fromkeys(("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), _VISIBLE),
    **dict.fromkeys((f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES" for kind in ("ASCEND_RT", "CUDA")), _VISIBLE),
    "PYTHONPATH": "it begins with this package's folder; what the command was started with follows",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "the engine must share its process with Megatron",
    "VLLM_ASCEND_ENABLE_NZ": "weights must lie as they are written in place",
    "VLLM_CPU_KVCACHE_SPACE": _MEMORY,
    "VLLM_CPU_OMP_THREADS_BIND": "ranks of one host must not share cores",
}
