"""Processes that have the simulated NPU (`tests/simulated_npu`): one that has it cannot be rid of it again."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "simulated_npu"
DEADLINE = 120  # seconds, with the time to compile the device


def environment(devices: int, **more: str) -> dict[str, str]:
    """Environment of a program that finds so many NPUs."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "SIMULATED_NPUS": str(devices), **more}


class Ranks:
    """Ranks of one hccl world, each a process with a device of its own."""

    def __init__(self, executors: list[ProcessPoolExecutor]):
        self._executors = executors

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank; the results in rank order."""
        futures = [executor.submit(function, *args) for executor in self._executors]
        return [future.result(timeout=DEADLINE) for future in futures]


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    """A world of so many ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        executors = [
            ProcessPoolExecutor(1, context, initializer=_join, initargs=(rank, world, folder))
            for rank in range(world)
        ]
        for executor in executors:
            stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        yield Ranks(executors)


def _join(rank: int, world: int, folder: str) -> None:
    # what Ray does for its workers
    os.environ.update(SIMULATED_NPUS=str(world), ASCEND_RT_VISIBLE_DEVICES=str(rank))
    sys.path.insert(0, str(FOLDER))
    import torch
    import torch.distributed as dist

    from mindspeed_rl.device.select import make_device

    torch.set_num_threads(1)
    device = make_device("npu")
    device.select(0)
    store = dist.FileStore(f"{folder}/rendezvous", world)
    dist.init_process_group(device.collectives_backend, store=store, rank=rank, world_size=world)
