"""vLLM on the CPU: shared memory of its own for each run; a kernel not to use; layers packed anew after an update."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_rl.checkpoint.files import read_json

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """Build a tensor-parallel engine inside: its shared memory gets a name no other run uses, and is gone at exit.

    vLLM names it after the way in which processes found each other, which is the same for every run in a process of
    ours: a second run on the machine, or what a killed one left, would collide. Once all ranks have it mapped the
    name is not needed any more; removed at once, nothing is left behind however the process ends.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    name: list[Any] = [f"mindspeed_rl_{uuid.uuid4().hex}"]
    dist.broadcast_object_list(name, src=0)
    shared_memory: Any = cpu_communicator._CPUSHMDistributed
    original = shared_memory.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"/{name[0]}{original(communicator).replace('/', '')}"

    shared_memory.make_group_name = staticmethod(make_group_name)
    try:
        yield
    finally:
        shared_memory.make_group_name = staticmethod(original)
        dist.barrier()
        for path in [*SHARED_MEMORY.glob(f"{name[0]}*"), *_broadcast_queues()]:
            path.unlink(missing_ok=True)  # another rank may have been faster


def _broadcast_queues() -> list[Path]:
    """Files of vLLM's object queues between tensor-parallel ranks."""
    from vllm.distributed import parallel_state

    queue = getattr(parallel_state._TP, "mq_broadcaster", None)
    buffer = getattr(queue, "buffer", None)
    return [SHARED_MEMORY / buffer.shared_memory.name] if buffer is not None else []


def arguments(model_folder: str) -> dict[str, Any]:
    """Of the engine, for latent attention: vLLM's rotary kernel is wrong for its queries, [tokens, heads, channels].

    Seen with vLLM 0.32, without scaling of the rope: with YaRN vLLM does not use that kernel.
    """
    has_latent_attention = "kv_lora_rank" in read_json(Path(model_folder) / "config.json")
    return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if has_latent_attention else {}


def reload_weights(worker: Any, weights: Any) -> None:
    """Load weights into layers that were re-packed after the last loading, which only vLLM's reload knows to undo."""
    model = worker.model_runner.model
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # experts are packed only for a kernel that is not there yet
    worker.reload_weights(weights_iterator=iter(weights))
    if model.config.tie_word_embeddings:
        # a tied output layer is not among the weights, and keeps a packed copy of the embedding: pack it anew
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
