"""What the host and the device do in chosen stages, written for TensorBoard and Perfetto: see `profiler`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rl.workers.context import Worker

_Stage = TypeVar("_Stage", bound=Callable[..., Any])


def profiled(what: str) -> Callable[[_Stage], _Stage]:
    """Of a worker's method that is a stage, or several: record it if the configuration asks for `what`.

    The method's first argument is the iteration, counted from 0.
    """

    def decorate(method: _Stage) -> _Stage:
        @functools.wraps(method)
        def stage(worker: Worker, iteration: int, *arguments: Any) -> Any:
            with _profile(worker, what, iteration):
                return method(worker, iteration, *arguments)

        return stage  # type: ignore[return-value]

    return decorate


def _profile(worker: Worker, what: str, iteration: int) -> AbstractContextManager[Any]:
    wanted = worker.config.profiler
    if iteration + 1 not in wanted.steps or worker.number not in wanted.ranks or what not in wanted.what:
        return nullcontext()
    folder = Path(worker.log_folder).parent / "profile"
    folder.mkdir(exist_ok=True)
    stem = f"step_{iteration + 1}_rank_{worker.number}_{what}"
    earlier = len(list(folder.glob(f"{stem}*")))  # generation in waves comes several times
    path = folder / (f"{stem}_{earlier + 1}" if earlier else stem)
    return worker.context.device.profile(
        path, shapes=wanted.with_shapes, memory=wanted.with_memory, stack=wanted.with_stack
    )
