"""Learning from given responses: SFT and DPO, which differ in the data set and the objective (one optimizer step a
batch; `algorithms/supervised.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.common.timing import Timings
from mindspeed_rl.common.timing import stage_seconds as by_stage
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.packing import balanced_partition, sequence_costs
from mindspeed_rl.data.supervised import SupervisedRow
from mindspeed_rl.device.base import Device
from mindspeed_rl.metrics.loggers import MetricLogger
from mindspeed_rl.metrics.names import with_aliases
from mindspeed_rl.metrics.throughput import (
    model_flops_utilisation,
    stage_seconds,
    tokens_per_second_per_device,
    train_flops,
)
from mindspeed_rl.trainer.saver import Saver
from mindspeed_rl.trainer.supervised_inputs import SupervisedInputs
from mindspeed_rl.trainer.trace import Trace
from mindspeed_rl.trainer.validation import is_due
from mindspeed_rl.workers.context import Source, WorkerReport
from mindspeed_rl.workers.fleet import watch_over
from mindspeed_rl.workers.group import WorkerGroup
from mindspeed_rl.workers.placement import Placement
from mindspeed_rl.workers.supervised import Shares
from mindspeed_rl.workers.supervised_worker import SupervisedWorker


class SupervisedFleet:
    """The workers: every device trains."""

    def __init__(self, config: Config, layout: Layout, model: ModelConfig, device: Device, log_folder: str):
        placement = Placement(config, layout, device)
        self.config, self.watch = config, watch_over(config, placement)
        self.workers = WorkerGroup(
            SupervisedWorker, layout.world, 0, self.watch, config, layout, model, device, placement, log_folder
        )

    def start(self, source: Source) -> None:
        """Build the engines and load weights and state."""
        futures = self.workers.start("start", 0, "start", self.workers.address(), source)
        self.watch.wait(futures, self.config.rl_config.start_timeout_minutes)

    def call(self, method: str, iteration: int, rows: Sequence[SupervisedRow], shares: Shares) -> list[WorkerReport]:
        """`update` or `validate` on every rank."""
        return self.watch.wait(self.workers.start(method, iteration + 1, method, iteration, rows, shares))

    def save(self, root: str, iteration: int) -> list[Any]:
        """Start writing the ranks' parts of a checkpoint; with `async_save`, copying them to be written."""
        return self.workers.start("save", iteration, "save", root, iteration)

    def finish_save(self, iteration: int) -> list[Any]:
        """Start waiting for what `save` has begun with `async_save`."""
        return self.workers.start("save", iteration, "finish_save")

    def kill(self) -> None:
        """End every worker process at once."""
        self.workers.kill()


class SupervisedTrainer:
    """Runs `train_iters` iterations, an optimizer step each.

    Args:
        config: the run's configuration.
        inputs: data, layout, checkpoints: what the run reads and where it goes on.
        fleet: the workers, started.
        saver: takes checkpoints; None: there are none.
        loggers: where metrics go.
        trace: where spans of time go; None: nowhere.
    """

    def __init__(
        self,
        config: Config,
        inputs: SupervisedInputs,
        fleet: SupervisedFleet,
        saver: Saver | None,
        loggers: Sequence[MetricLogger],
        trace: Trace | None = None,
    ):
        self.config, self.inputs, self.layout = config, inputs, inputs.layout
        self.fleet, self.saver, self.loggers, self.trace = fleet, saver, loggers, trace
        self.iteration = inputs.completed  # the next one to run, counted from 0; users see steps, counted from 1

    def fit(self) -> None:
        """Train until `train_iters` iterations are complete."""
        if self.iteration == 0 and (validated := self._validate_if_due()):
            self._log(0, validated)
        while self.iteration < self.config.actor.train_iters:
            timings = Timings(self.iteration)
            with timings("all"):
                rows = [
                    self.inputs.dataset[index]
                    for index in self.inputs.sampler.take(self.config.actor.global_batch_size)
                ]
                reports = self.fleet.call("update", self.iteration, rows, self._shares(rows))
            self.iteration += 1
            self._save_if_due(timings)
            metrics = self._metrics(rows, reports, timings)
            self._log(self.iteration, {**metrics, **self._validate_if_due()})
        if self.saver:
            self.saver.wait()

    def _shares(self, rows: Sequence[SupervisedRow]) -> Shares:
        """Rows of each data-parallel rank, equally many: by what they cost, or as they come."""
        if self.config.rl_config.balance_batch:
            costs = [sum(sequence_costs(row.lengths, self.inputs.model)) for row in rows]
            return balanced_partition(costs, self.layout.dp)
        size = len(rows) // self.layout.dp
        return [range(rank * size, (rank + 1) * size) for rank in range(self.layout.dp)]

    # ---- validation ----------------------------------------------------------------------------------------------

    def _validate_if_due(self) -> dict[str, float]:
        if self.inputs.validation is None or not is_due(self.config, self.iteration):
            return {}
        by_source: dict[str, list[SupervisedRow]] = {}
        for row in self.inputs.validation.rows:
            by_source.setdefault(row.data_source, []).append(row)
        found = {source: self._validate(rows) for source, rows in by_source.items()}
        whole = MetricSet()
        for metrics in found.values():
            whole.merge(metrics)
        return {
            f"val/{source}/{name.partition('/')[2]}": value
            for source, metrics in {**found, "all": whole}.items()
            for name, value in metrics.finalize().items()
        }

    def _validate(self, rows: Sequence[SupervisedRow]) -> MetricSet:
        metrics, size = MetricSet(), self.config.actor.global_batch_size
        for start in range(0, len(rows), size):
            batch = list(rows[start : start + size])
            batch += [batch[0].unlearned()] * (-len(batch) % self.layout.dp)
            for report in self.fleet.call("validate", self.iteration, batch, self._shares(batch)):
                metrics.merge(report.metrics)
                self._trace(report)
        return metrics

    # ---- what is reported ----------------------------------------------------------------------------------------

    def _metrics(
        self, rows: Sequence[SupervisedRow], reports: Sequence[WorkerReport], timings: Timings
    ) -> dict[str, float]:
        merged, seconds = MetricSet(), dict[str, list[float]]()
        for report in reports:
            merged.merge(report.metrics)
            merged.max("memory/device_peak", report.peak_memory_bytes / 2**30, unit="GiB")
            merged.max("memory/host_peak", report.peak_host_bytes / 2**30, unit="GiB")
            self._trace(report)
            for stage, value in by_stage(report.spans).items():
                seconds.setdefault(stage, []).append(value)
        if self.trace is not None:
            self.trace.add("driver", timings.spans)
        lengths = [length for row in rows for length in row.lengths]
        trained = self.iteration * self.config.actor.global_batch_size
        merged.mean("data/epoch", trained / len(self.inputs.dataset), unit="epochs")
        metrics = merged.finalize()
        metrics |= {f"timing/{stage}": value for stage, value in by_stage(timings.spans).items()}
        metrics |= {f"timing/{stage}": max(values) for stage, values in seconds.items()}
        update = stage_seconds(seconds["update"], self.config.rl_config.log_max_throughput)
        world = self.layout.world
        metrics["throughput/total"] = tokens_per_second_per_device(sum(lengths), metrics["timing/all"], world)
        metrics["throughput/update"] = tokens_per_second_per_device(sum(lengths), update, world)
        if (peak := reports[0].peak_flops) is not None:
            flops = train_flops(self.inputs.model, lengths)
            metrics["throughput/mfu"] = model_flops_utilisation(flops, update, world, peak)
        return with_aliases(metrics)

    def _trace(self, report: WorkerReport) -> None:
        if self.trace is not None:
            self.trace.add(f"rank {report.rank}", report.spans)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log(step, metrics)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save_if_due(self, timings: Timings) -> None:
        actor = self.config.actor
        due = self.iteration % actor.save_interval == 0 or self.iteration == actor.train_iters
        if self.saver and due:
            with timings("save"):
                self.saver.save(self.iteration, self.state_dict(), None)
        elif self.saver:
            self.saver.check()

    def state_dict(self) -> dict[str, Any]:
        """What the driver must remember to go on exactly."""
        actor = self.config.actor
        saved = {"optimizer": not actor.no_save_optim, "rng": not actor.no_save_rng}
        return {
            "stage": actor.stage,
            "iteration": self.iteration,
            "sampler": self.inputs.sampler.state_dict(),
            "start_weights": self.inputs.source.weights,
            "lora": actor.lora_settings,
            "saved": [part for part, is_saved in saved.items() if is_saved],
        }
