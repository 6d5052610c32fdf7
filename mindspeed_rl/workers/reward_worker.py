"""Scores responses and turns scores into advantages, beside the devices."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.common.logging import setup_logging
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.common.timing import Span, Timings
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.rewards.manager import RewardManager
from mindspeed_rl.rewards.verifiers import RewardSample
from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.spec import Claim, TransferDock

logger = logging.getLogger(__name__)


@dataclass
class RewardReport:
    """What scoring says about an iteration."""

    spans: list[Span]
    metrics: MetricSet
    samples: list[dict[str, Any]] = field(default_factory=list)  # a few: prompt, response, label, reward
    sequence_lengths: list[int] = field(default_factory=list)  # tokens of every scored sample, prompt and response


class RewardWorker:
    """A local (CPU) actor with two stages, `score` and `compute_advantages`.

    They run side by side, also for several iterations: so many calls are in progress at once (`concurrent_calls`).
    """

    SHOWN_SAMPLES = 3
    # while others generate: scoring in parts overlaps with that, but a claim for each group would cost too much
    CLAIMS_PER_ITERATION = 4

    def __init__(
        self, config: Config, layout: Layout, tokenizer: PreTrainedTokenizerBase, dock: TransferDock, log_folder: str
    ):
        setup_logging(log_folder, "reward", capture=True)
        self.config, self.layout, self.tokenizer, self.dock = config, layout, tokenizer, dock
        self.manager = RewardManager(config.rl_config)
        self.scoring = threading.Lock()  # of one iteration at a time
        # rollout works iterations off in turn, and their rewards wait side by side
        self.timeout = 60 * config.rl_config.stage_timeout_minutes * (1 + config.rl_config.staleness)

    def _claim(self, consumer: str, timings: Timings) -> Claim | None:
        rows, group = self.layout.sequences_per_iteration, self.config.rl_config.n_samples_per_prompt
        parts = 1 if self.config.rl_config.blocking else self.CLAIMS_PER_ITERATION
        count = math.ceil(rows / parts / group) * group
        with timings.waiting(consumer):
            return self.dock.claim(consumer, timings.iteration, count, timeout=self.timeout)

    def score(self, iteration: int) -> RewardReport:
        """Score every response of the iteration; a sample that cannot be scored gets NaN and is counted."""
        timings = Timings(iteration)
        report = RewardReport(timings.spans, MetricSet())
        while (claim := self._claim("reward", timings)) is not None:
            with timings("rule_reward"):
                columns = self.dock.get(claim, self.dock.spec.consumers["reward"].needs)
                texts = columns.get("texts") or self.tokenizer.batch_decode(
                    [response.tolist() for response in columns["responses"]], skip_special_tokens=True
                )
                samples = [
                    RewardSample(sample.prompt_text, text, sample.label, sample.extra)
                    for sample, text in zip(columns["sample"], texts, strict=True)
                ]
                with self.scoring:
                    result = self.manager.score(samples)
                self.dock.ack(claim, {"rewards": result.total})
            report.metrics.merge(result.metrics())
            for name, messages in result.messages.items():
                if messages:  # one of them shows what is wrong; all are counted
                    index, message = next(iter(messages.items()))
                    logger.warning(
                        "iteration %d: %s failed on %d samples, such as row %d: %s",
                        iteration,
                        name,
                        len(messages),
                        claim.rows[index],
                        message,
                    )
            self._add_metrics(report, columns, samples, result.total)
        return report

    def _add_metrics(
        self, report: RewardReport, columns: dict[str, list[Any]], samples: list[RewardSample], rewards: list[float]
    ) -> None:
        metrics, limit = report.metrics, self.config.generate_config.sampling_config.max_tokens
        scored = [reward for reward in rewards if math.isfinite(reward)]
        for name in ("mean", "max", "min", "std"):
            getattr(metrics, name)(f"reward/{name}", scored)
        for source in {sample.data_source for sample in columns["sample"]}:
            of_source = [
                reward
                for sample, reward in zip(columns["sample"], rewards, strict=True)
                if sample.data_source == source and math.isfinite(reward)
            ]
            metrics.mean(f"reward/source/{source}", of_source)
        lengths = {
            "response_length": [len(response) for response in columns["responses"]],
            "prompt_length": [len(sample.prompt_ids) for sample in columns["sample"]],
        }
        for name, values in lengths.items():
            metrics.mean(f"{name}/mean", values)
            metrics.max(f"{name}/max", values)
            metrics.min(f"{name}/min", values)
            metrics.sum(f"{name}/total", values)
        metrics.mean("response_length/clip_fraction", [float(n >= limit) for n in lengths["response_length"]])
        report.sequence_lengths += [sum(pair) for pair in zip(*lengths.values(), strict=True)]
        for sample, reward in list(zip(samples, rewards, strict=True))[: self.SHOWN_SAMPLES - len(report.samples)]:
            report.samples.append(
                {"prompt": sample.prompt, "response": sample.response, "label": sample.label, "reward": reward}
            )

    def compute_advantages(self, iteration: int) -> RewardReport:
        """Advantages and loss mask of every group, as soon as all its rewards are there."""
        timings, metrics, rl = Timings(iteration), MetricSet(), self.config.rl_config
        while (claim := self._claim("advantage", timings)) is not None:
            with timings("adv"):
                columns = self.dock.get(claim, ("rewards", "responses"))
                rewards = torch.as_tensor(columns["rewards"], dtype=torch.float32)
                lengths = torch.tensor([len(response) for response in columns["responses"]])
                groups = torch.tensor(claim.rows) // rl.n_samples_per_prompt
                # samples whose scoring failed do not train
                mask = torch.repeat_interleave(torch.isfinite(rewards).float(), lengths)
                advantages = compute_advantages(rl.adv_estimator, rewards, groups, mask, lengths, rl)
                results = {"advantages": Jagged(advantages, lengths), "loss_mask": Jagged(mask, lengths)}
                self.dock.ack(claim, results)
            for group in groups.unique():
                scored = rewards[(groups == group) & torch.isfinite(rewards)]
                metrics.mean(
                    "reward/zero_variance_groups", float(len(scored) == 0 or bool((scored == scored[0]).all()))
                )
        return RewardReport(timings.spans, metrics)

    @staticmethod
    def concurrent_calls(config: Config) -> int:
        """Both stages of every iteration that may be under way, and `close`, which must not wait for them."""
        return 2 * (config.rl_config.staleness + 1) + 1

    def close(self) -> None:
        """End the verifiers' processes."""
        self.manager.close()
