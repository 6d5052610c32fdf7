"""Gathers what workers say during a step into the step's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_rl.common.metric import Metric, MetricSet
from mindspeed_rl.common.timing import Timings
from mindspeed_rl.common.timing import stage_seconds as by_stage
from mindspeed_rl.config.layout import Layout, has_critic_model, uses_full_kl
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.metrics.names import with_aliases
from mindspeed_rl.metrics.throughput import (
    TRAIN_TO_FORWARD,
    model_flops_utilisation,
    stage_seconds,
    step_throughput,
    train_flops,
)
from mindspeed_rl.trainer.trace import Trace
from mindspeed_rl.workers.context import WorkerReport
from mindspeed_rl.workers.reward_worker import RewardReport

REWARD = -1  # stands for the reward worker where others have a rank


class StepReport:
    """One step: add reports as stages end, then `finalize`.

    Args:
        config: the run's configuration.
        layout: its parallel layout.
        model: shape of the model.
        iteration: counted from 0.
        trace: where all spans go, too; None: nowhere.
    """

    def __init__(self, config: Config, layout: Layout, model: ModelConfig, iteration: int, trace: Trace | None):
        self.config, self.layout, self.model = config, layout, model
        self.metrics = MetricSet()
        self.timings, self.trace = Timings(iteration), trace  # stages of the driver
        self.dock_wait: dict[str, float] = {}  # stage -> seconds that its claims waited for rows
        self.samples: list[dict[str, Any]] = []
        self.sequence_lengths: list[int] = []
        self.peak_flops: float | None = None
        self._rank_seconds: dict[int, dict[str, float]] = {}  # rank, or REWARD -> stage -> seconds

    def add(self, reports: Iterable[WorkerReport | RewardReport]) -> None:
        """Add what ranks or the reward worker said about a stage."""
        for report in reports:
            self.metrics.merge(report.metrics)
            rank = report.rank if isinstance(report, WorkerReport) else REWARD
            seconds = self._rank_seconds.setdefault(rank, {})
            for stage, value in by_stage(report.spans).items():
                seconds[stage] = seconds.get(stage, 0.0) + value
            if self.trace is not None:
                self.trace.add("reward worker" if rank == REWARD else f"rank {rank}", report.spans)
            if isinstance(report, WorkerReport):
                self.metrics.max("memory/device_peak", report.peak_memory_bytes / 2**30, unit="GiB")
                self.metrics.max("memory/host_peak", report.peak_host_bytes / 2**30, unit="GiB")
                self.peak_flops = report.peak_flops
            else:
                self.samples += report.samples
                self.sequence_lengths += report.sequence_lengths

    @property
    def kl(self) -> float:
        """Mean KL to the reference over the iteration's counted tokens; 0 without a reference."""
        metric = self.metrics.get("actor/kl", Metric(0.0, 0.0, "mean"))
        return metric.result or 0.0

    def finalize(self, kl_coef: float) -> dict[str, float]:
        """All metrics of the step by name, MindSpeed RL's aliases included. Called once, when all is added."""
        if self.trace is not None:
            self.trace.add("driver", self.timings.spans)
        result = self.metrics.finalize()
        result["actor/kl_coef"] = kl_coef
        result |= {f"timing/{stage}": value for stage, value in self._stage_seconds().items()}
        result |= {f"dock/wait/{stage}": value for stage, value in self.dock_wait.items()}
        result |= self._throughput(result)
        return with_aliases(result)

    def _stage_seconds(self) -> dict[str, float]:
        """The slowest rank's time of every stage."""
        result = by_stage(self.timings.spans)
        for seconds in self._rank_seconds.values():
            for stage, value in seconds.items():
                result[stage] = max(value, result.get(stage, 0.0))
        return result

    def _throughput(self, result: Mapping[str, float]) -> dict[str, float]:
        slowest = self.config.rl_config.log_max_throughput
        seconds = {f"timing/{stage}": value for stage, value in by_stage(self.timings.spans).items()}
        for stage in ("rollout", "update"):
            by_rank = [ranks[stage] for ranks in self._rank_seconds.values() if stage in ranks]
            seconds[f"timing/{stage}"] = stage_seconds(by_rank, slowest)
        responses = int(self.metrics["response_length/total"].value)
        prompts = int(self.metrics["prompt_length/total"].value)
        longest = int(result["response_length/max"])
        devices = {"all": self.layout.devices, "update": self.layout.world, "rollout": self.layout.rollout_world}
        rates = step_throughput(prompts, responses, longest, devices, seconds, sum(self.sequence_lengths))
        if self.peak_flops:
            models = 2.0 if has_critic_model(self.config) else 1.0
            if uses_full_kl(self.config):
                models += 1 / TRAIN_TO_FORWARD  # the reference's forward passes
            flops = models * self.config.rl_config.epochs * train_flops(self.model, self.sequence_lengths)
            update = seconds["timing/update"]
            rates["throughput/mfu"] = model_flops_utilisation(flops, update, devices["update"], self.peak_flops)
        return rates
