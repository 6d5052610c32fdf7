"""Validation: other prompts, answered by the weights of the moment, that training does not get to see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.metrics.evaluation import flat, metrics_by_source
from mindspeed_rl.workers.evaluation import response_row
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.group import Call


def is_due(config: Config, step: int) -> bool:
    """Whether to validate the weights after so many iterations."""
    rl = config.rl_config
    if step == 0:
        return rl.val_before_train
    return rl.test_freq > 0 and (step % rl.test_freq == 0 or step == config.actor.train_iters)


class Validation:
    """Answers and scores `val_data_path`. Nothing that training depends on changes by it.

    Args:
        config: the run's configuration.
        dataset: the prompts.
        fleet: the workers.
        reward: handle of the reward worker (a Ray actor).
    """

    def __init__(self, config: Config, dataset: PromptDataset, fleet: Fleet, reward: Any):
        self.config, self.fleet, self.reward = config, fleet, reward
        self.samples = dataset.samples
        self._prompts = ray.put([sample.prompt_ids for sample in self.samples])  # once, for every rank and validation
        self._samples = ray.put(self.samples)

    def is_due(self, step: int) -> bool:
        """See `is_due`."""
        return is_due(self.config, step)

    def run(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics of a step, by name, and each response with what it got, in the order of the prompts."""
        start = time.monotonic()
        metrics, rows = self.evaluate(step)
        named = {f"val/{name}": value for name, value in flat(metrics).items()}
        return {**named, "timing/validation": time.monotonic() - start}, rows

    def evaluate(self, step: int) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
        """The same, metrics by source and name."""
        shares = [share for share in self.fleet.validate(step, self._prompts) if share]
        responses = _interleaved(shares, len(self.samples))
        call = self.reward.evaluate.remote(self._samples, responses)
        (found,) = self.fleet.watch.wait([self.fleet.watch.add(call, Call(-1, "validation", step))])
        metrics = metrics_by_source([each for each, _ in found], self.config.rl_config.val_metric)
        return metrics, [response_row(self.samples[each.prompt], each, text) for each, text in found]


def _interleaved(shares: Sequence[list[Any]], count: int) -> list[Any]:
    """What replica r has of the numbers r, r + replicas, … in the order of the numbers."""
    return [shares[number % len(shares)][number // len(shares)] for number in range(count)]
