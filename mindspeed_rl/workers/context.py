"""What every worker has, whatever its roles: its place in the run, its device, and the dock."""

from __future__ import annotations

import logging
import os
import resource
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import ray
import torch
import torch.distributed as dist

from mindspeed_rl.common.logging import setup_logging
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.common.timing import Span, Timings
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.base import Device
from mindspeed_rl.device.select import make_device
from mindspeed_rl.transfer_dock.spec import TransferDock

logger = logging.getLogger(__name__)


@dataclass
class WorkerReport:
    """What one rank says about one stage."""

    rank: int  # its number in the run
    spans: list[Span]
    metrics: MetricSet = field(default_factory=MetricSet)
    peak_memory_bytes: int = 0  # on the device, since the step started
    peak_host_bytes: int = 0  # of this process
    peak_flops: float | None = None  # of the device at the training precision, where known


@dataclass(frozen=True)
class Source:
    """Where a run's weights and state come from."""

    hf_folder: str  # configuration and tokenizer files in Hugging Face form
    weights: str  # Hugging Face folder or checkpoint folder: start of actor and reference
    state: str | None = None  # checkpoint whose actor, optimizer and RNG the run goes on from
    load_optim: bool = True
    load_rng: bool = True
    critic_weights: str | None = None  # what the critic starts from, if not from `weights`


class PeakMemory:
    """Largest memory in use on the device in a step.

    Torch counts what a sleeping rollout engine has given back as in use: it is taken off while the engine sleeps.
    """

    def __init__(self, device: Device):
        self._device, self._peak, self._asleep = device, 0, 0

    @property
    def nbytes(self) -> int:
        """Since the last reset."""
        return max(self._peak, self._device.max_memory_allocated() - self._asleep)

    def reset(self) -> None:
        """A step starts."""
        self._peak = 0
        self._device.reset_peak_memory()

    def asleep(self, nbytes: int) -> None:
        """From now on, so much of what torch counts is not there."""
        if nbytes == self._asleep:  # on a CPU, where a new measurement lowers the host's peak, too
            return
        self._peak = self.nbytes
        self._device.reset_peak_memory()
        self._asleep = nbytes


@dataclass(frozen=True)
class Context:
    """A worker's place in the run. Ranks are counted within a world (the ranks that share collectives)."""

    rank: int
    number: int  # among all workers of the run: those of rollout apart from training come after the training ranks
    config: Config
    layout: Layout
    device: Device
    shared_dock: TransferDock | None  # None: samples do not go through one

    @property
    def dock(self) -> TransferDock:
        """What samples go through."""
        assert self.shared_dock is not None, "this run has no TransferDock"
        return self.shared_dock

    @cached_property
    def memory(self) -> PeakMemory:
        """Of this rank's device."""
        return PeakMemory(self.device)

    @property
    def stage_seconds(self) -> float:
        """Deadline of one stage."""
        return 60 * self.config.rl_config.stage_timeout_minutes

    @property
    def collective_minutes(self) -> float:
        """Deadline of one collective."""
        return self.config.actor.distributed_timeout_minutes

    def report(self, timings: Timings, metrics: MetricSet | None = None) -> WorkerReport:
        """What this rank says about a stage, with the memory it has taken so far."""
        return WorkerReport(
            self.number,
            timings.spans,
            metrics or MetricSet(),
            peak_memory_bytes=self.memory.nbytes,
            peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
            peak_flops=self.device.peak_flops(self.config.actor.bf16),
        )


class Worker:
    """A Ray actor that owns one device, as one rank of a world. Methods of its subclasses are stages of a step.

    Args:
        rank: in its world.
        number: among all workers of the run.
        config: the run's configuration.
        layout: its parallel layout.
        model: shape of the model.
        log_folder: where the log of this process goes.
    """

    def __init__(self, rank: int, number: int, config: Config, layout: Layout, model: ModelConfig, log_folder: str):
        setup_logging(log_folder, f"rank_{number:05d}", capture=True)
        self.rank, self.number, self.config, self.layout, self.model = rank, number, config, layout, model
        self.log_folder = log_folder

    def address(self) -> str:
        """`host:port` on which this process can be reached."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def prepare(self, device: Device) -> None:
        """Adapt this process to its device, before anything that needs that is imported."""
        from mindspeed_rl.engine.megatron.bootstrap import prepare

        prepare(device, self.config.actor)

    def join(self, address: str, world: int, dock: TransferDock | None) -> None:
        """Take this process's device and join the `world` ranks whose rank 0 is at `address`."""
        device = make_device(self.config.device)
        self.prepare(device)
        if self.config.actor.npu_deterministic:
            torch.use_deterministic_algorithms(True)  # the variables that belong to it came with the process
        device.select(0)  # Ray shows each worker its own device only
        logger.info("%s of %d visible, %.1f GiB", device.name, device.count(), device.total_memory() / 2**30)
        host, port = address.rsplit(":", 1)
        os.environ.update(
            MASTER_ADDR=host, MASTER_PORT=port, RANK=str(self.rank), WORLD_SIZE=str(world), LOCAL_RANK="0"
        )
        self.context = Context(self.rank, self.number, self.config, self.layout, device, dock)
        minutes = self.context.collective_minutes
        dist.init_process_group(device.collectives_backend, timeout=timedelta(minutes=minutes))
