"""Ray actors that form one world, and watching over calls: the first failure ends every wait, by name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from mindspeed_rl.common.errors import MindSpeedRLError, NodeLost, WorkerFailed
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.base import Device
from mindspeed_rl.workers.context import Worker
from mindspeed_rl.workers.placement import Node, Placement, cluster_nodes


@dataclass(frozen=True)
class Call:
    """What a future stands for: a stage of a step, on a worker (other actors: `WorkerFailed.NOT_RANKS`)."""

    rank: int
    stage: str
    step: int


class Watch:
    """All calls in progress. Who waits for some of them hears of the first failure of any.

    Args:
        timeout_minutes: deadline of a wait, unless told otherwise.
        nodes: of the ranks, in rank order.
        way_out: what to do about a lost node, for the user.
    """

    # A peer of lost ranks fails at once, Ray misses their node after some 15 s: the cause is worth waiting for
    LOSS_SHOWS_SECONDS = 30.0

    def __init__(self, timeout_minutes: float, nodes: Sequence[Node] = (), way_out: str = ""):
        self.timeout_minutes, self.nodes, self.way_out = timeout_minutes, nodes, way_out
        self._calls: dict[ray.ObjectRef, Call] = {}

    def add(self, future: ray.ObjectRef, call: Call) -> ray.ObjectRef:
        """Watch over a call from now on."""
        self._calls[future] = call
        return future

    def wait(self, futures: Sequence[ray.ObjectRef], timeout_minutes: float | None = None) -> list[Any]:
        """Results of `futures`, in their order.

        Raises:
            NodeLost: a node with ranks is no longer there.
            WorkerFailed: a call failed, one of these or another, or the deadline passed; names rank, stage and step.
            MindSpeedRLError: a worker raised an error that a user can act on; its message is kept.
        """
        timeout_minutes = timeout_minutes or self.timeout_minutes
        deadline = time.monotonic() + 60 * timeout_minutes
        while pending := [future for future in futures if future in self._calls]:
            done, _ = ray.wait(list(self._calls), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                call = self._calls[pending[0]]
                reason = f"not finished after {timeout_minutes:g} minutes"
                raise WorkerFailed(call.rank, call.stage, call.step, reason)
            for future in done:
                call = self._calls.pop(future)
                try:
                    _raise_failure(future, call)
                except MindSpeedRLError as error:
                    self._raise_lost_node(call, error)
                    raise
        return [ray.get(future) for future in futures]

    def _raise_lost_node(self, call: Call, error: MindSpeedRLError) -> None:
        """If a node is gone, that is the cause of whatever failed, and wherever."""
        if len({node.id for node in self.nodes}) < 2:
            return  # the one node is the driver's, or the error tells it all
        waits = isinstance(error, WorkerFailed)
        deadline = time.monotonic() + (self.LOSS_SHOWS_SECONDS if waits else 0)
        while not (lost := [node for node in cluster_nodes() if node.lost is not None and self._ranks(node)]):
            if time.monotonic() >= deadline:
                return
            time.sleep(0.2)
        node, ranks = lost[0], self._ranks(lost[0])
        who = f"worker rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        raise NodeLost(str(node), who, call.stage, call.step, node.lost or "", self.way_out) from error

    def _ranks(self, node: Node) -> list[int]:
        return [rank for rank, own in enumerate(self.nodes) if own.id == node.id]


def _raise_failure(future: ray.ObjectRef, call: Call) -> None:
    try:
        ray.get(future)
    except RayActorError as error:
        reason = f"its process died ({str(error).splitlines()[0]})"
        raise WorkerFailed(call.rank, call.stage, call.step, reason) from error
    except RayTaskError as error:
        if isinstance(error.cause, MindSpeedRLError):
            raise error.cause from error
        raise WorkerFailed(call.rank, call.stage, call.step, f"{error.cause!r}\n{error}") from error


class WorkerGroup:
    """The ranks of one world, an actor and a device each.

    Args:
        worker: class of the actors.
        world: number of ranks.
        first: number of rank 0 among all workers of the run.
        watch: what watches over their calls.
        config: the run's configuration.
        layout: its parallel layout.
        model: shape of the model.
        device: kind of device.
        placement: where the ranks of the run live.
        log_folder: where the workers' logs go.
    """

    def __init__(
        self,
        worker: type[Worker],
        world: int,
        first: int,
        watch: Watch,
        config: Config,
        layout: Layout,
        model: ModelConfig,
        device: Device,
        placement: Placement,
        log_folder: str,
    ):
        self.world, self.first, self.watch, self.config = world, first, watch, config
        actor: Any = ray.remote(worker)
        # what the user says wins, as in OMP_NUM_THREADS; what may not be changed is refused before
        environment = {"env_vars": {**device.worker_environment(layout.devices), **config.environment}}
        self.workers: list[Any] = [
            actor.options(runtime_env=environment, **placement.options(first + rank)).remote(
                rank, first + rank, config, layout, model, log_folder
            )
            for rank in range(world)
        ]

    def start(self, stage: str, step: int, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Call `method` on every rank without waiting: a future a rank, in rank order."""
        return [
            self.watch.add(getattr(worker, method).remote(*args), Call(self.first + rank, stage, step))
            for rank, worker in enumerate(self.workers)
        ]

    def address(self) -> str:
        """Where rank 0 can be reached: `host:port`."""
        future = self.workers[0].address.remote()
        self.watch.add(future, Call(self.first, "start (waiting for a device)", 0))
        return self.watch.wait([future], self.config.rl_config.start_timeout_minutes)[0]

    def kill(self) -> None:
        """End every worker process at once."""
        for worker in self.workers:
            ray.kill(worker)
