"""Runs a function on several gloo ranks, each a process of its own.

Ranks are forked from a server that has imported the libraries: a fresh interpreter would spend 5 to 13 s on that.
"""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing as mp

TESTS = Path(__file__).resolve().parents[1]


@cache
def _start_server() -> None:
    forkserver.set_forkserver_preload(["support.preload"])
    with mock.patch.dict(os.environ, PYTHONPATH=f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"):
        forkserver.ensure_running()  # Python 3.11 gives it no module path of its own


def _rank(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        dist.barrier()  # who leaves at once would close connections that others are still making
        result = function(rank, *args)
    except BaseException:  # reported in the parent, where the test fails
        with open(f"{folder}/error", "a") as file:
            file.write(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(result, file)
    os._exit(0)  # libraries loaded here must not hold up the end


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on `world` ranks with torch.distributed up; the results in rank order."""
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            _rank, (world, folder, function, args), nprocs=world, join=False, start_method="forkserver"
        )
        try:
            while not ranks.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
            errors = Path(folder, "error")
            raise AssertionError(f"a rank failed: {errors.read_text() if errors.exists() else failure}") from None
        finally:
            for process in ranks.processes:
                process.kill()  # after a timeout they would go on, and slow down the tests that follow
                process.join()
        results = []
        for rank in range(world):
            with open(f"{folder}/{rank}", "rb") as file:
                results.append(pickle.load(file))
        return results


def leave_parallel_state() -> None:
    """End Megatron's, all of it: 0.12 still knows which ranks were in a group that is gone."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    mpu._EMBEDDING_GLOBAL_RANKS = mpu._POSITION_EMBEDDING_GLOBAL_RANKS = None


@contextmanager
def process_groups() -> Iterator[None]:
    """Ends Megatron's parallel state, and the groups made meanwhile: each has threads, which add up to thousands."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    before = set(_world.pg_map)
    yield
    leave_parallel_state()
    for group in set(_world.pg_map) - before:
        dist.destroy_process_group(group)


class Worlds:
    """Worlds of different sizes, one after the other, in the same processes."""

    def __init__(self, rank: int, ranks: int, root: str):
        import torch.distributed as dist

        from mindspeed_rl.config.schema import MegatronConfig
        from mindspeed_rl.device.select import make_device
        from mindspeed_rl.engine.megatron.bootstrap import prepare

        self.rank, self.ranks, self.root, self.number = rank, ranks, root, 0
        self.device = make_device("cpu")
        prepare(self.device, MegatronConfig())
        self.store = dist.FileStore(f"{root}/meeting", ranks)
        dist.destroy_process_group()

    @contextmanager
    def world(self, size: int) -> Iterator[bool]:
        """Whether this rank takes part; ends when all of the world have ended it."""
        import torch.distributed as dist

        self.number += 1
        if self.rank < size:
            method = f"file://{self.root}/world{self.number}"
            dist.init_process_group("gloo", init_method=method, rank=self.rank, world_size=size)
        yield self.rank < size
        if self.rank < size:
            leave_parallel_state()
            if dist.is_initialized():  # vLLM takes it along
                dist.destroy_process_group()
        if self.store.add(f"ended{self.number}", 1) == self.ranks:
            self.store.set(f"next{self.number}", "1")
        self.store.wait([f"next{self.number}"])
