"""Starts the workers of a run and watches over them: the first failure ends every wait, by name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from mindspeed_rl.common.errors import MindSpeedRLError, WorkerFailed
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.base import Device
from mindspeed_rl.workers.integrated_worker import IntegratedWorker


def wait(futures: Mapping[ray.ObjectRef, int], stage: str, step: int, timeout_minutes: float) -> dict[int, list[Any]]:
    """Results of `futures` by rank, in the order given.

    Raises:
        WorkerFailed: one of them failed or the deadline passed. Which rank, stage and step is in the message.
        MindSpeedRLError: a worker raised an error that a user can act on; its message is kept.
    """
    deadline = time.monotonic() + 60 * timeout_minutes
    pending = list(futures)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            rank = futures[pending[0]]
            raise WorkerFailed(rank, stage, step, f"not finished after {timeout_minutes:g} minutes")
        for future in done:
            _raise_failure(future, futures[future], stage, step)
    results: dict[int, list[Any]] = {}
    for future, rank in futures.items():
        results.setdefault(rank, []).append(ray.get(future))
    return results


def _raise_failure(future: ray.ObjectRef, rank: int, stage: str, step: int) -> None:
    try:
        ray.get(future)
    except RayActorError as error:
        reason = str(error).splitlines()[0]
        raise WorkerFailed(rank, stage, step, f"its process died ({reason})") from error
    except RayTaskError as error:
        if isinstance(error.cause, MindSpeedRLError):
            raise error.cause from error
        raise WorkerFailed(rank, stage, step, f"{error.cause!r}\n{error}") from error


class WorkerGroup:
    """The integrated workers, one for each device.

    Args:
        config: the run's configuration.
        layout: its parallel layout.
        model: shape of the model.
        device: kind of device, to ask Ray for the right resource.
        log_folder: where the workers' logs go.
    """

    def __init__(self, config: Config, layout: Layout, model: ModelConfig, device: Device, log_folder: str):
        self.config = config
        resources = {device.ray_resource: 1.0} if device.ray_resource not in (None, "GPU") else {}
        actor = ray.remote(IntegratedWorker).options(
            num_cpus=1,
            num_gpus=1 if device.ray_resource == "GPU" else 0,
            resources=resources,
            runtime_env={"env_vars": device.worker_environment(layout.world)},
        )
        self.workers: list[Any] = [
            actor.remote(rank, config, layout, model, log_folder) for rank in range(layout.world)
        ]

    def start(self, method: str, *args: Any) -> dict[ray.ObjectRef, int]:
        """Call `method` on every rank without waiting: future -> rank."""
        return {getattr(worker, method).remote(*args): rank for rank, worker in enumerate(self.workers)}

    def run(self, stage: str, step: int, method: str, *args: Any, timeout_minutes: float | None = None) -> list[Any]:
        """Call `method` on every rank and wait: one result a rank, in rank order."""
        timeout = timeout_minutes or self.config.rl_config.stage_timeout_minutes
        results = wait(self.start(method, *args), stage, step, timeout)
        return [results[rank][0] for rank in sorted(results)]

    def address(self) -> str:
        """Where rank 0 can be reached: `host:port`."""
        minutes = self.config.rl_config.start_timeout_minutes
        future = self.workers[0].address.remote()
        return wait({future: 0}, "start (waiting for a device)", 0, minutes)[0][0]

    def kill(self) -> None:
        """End every worker process at once."""
        for worker in self.workers:
            ray.kill(worker)


def flatten(results: Mapping[int, Sequence[Any]]) -> list[Any]:
    """All results of `wait`, rank by rank."""
    return [result for rank in sorted(results) for result in results[rank]]
