"""All workers of a run, as the training loop sees them: the same calls whether roles share devices or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import ray

from mindspeed_rl.config.layout import (
    Layout,
    scores_before_rewards,
    scores_while_generating,
    stages_beside_rewards,
    uses_reward_model,
)
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.base import Device
from mindspeed_rl.transfer_dock.spec import TransferDock
from mindspeed_rl.workers.context import Source, WorkerReport
from mindspeed_rl.workers.group import Call, Watch, WorkerGroup
from mindspeed_rl.workers.integrated_worker import IntegratedWorker
from mindspeed_rl.workers.placement import Placement
from mindspeed_rl.workers.rollout_worker import RolloutWorker
from mindspeed_rl.workers.training_worker import TrainingWorker
from mindspeed_rl.workers.weights import WeightBoard

Futures = list[ray.ObjectRef]  # each of a `WorkerReport`


class Fleet(Protocol):
    """What the loop asks of workers. Iterations count from 0; steps, in messages, from 1."""

    watch: Watch  # over all calls in progress

    def start(self, dock: TransferDock, source: Source, stop_tokens: Sequence[int]) -> None:
        """Build the engines and load weights and state."""

    def sync_weights(self, version: int) -> list[WorkerReport]:
        """Hand the actor's weights to rollout; `version` is the number of iterations they were trained for."""

    def validate(self, iteration: int, prompts: ray.ObjectRef) -> list[list[list[list[int]]]]:
        """Have prompts, [prompt length] ids each, answered by the weights after `iteration` iterations.

        Returns:
            What every rank says: see `Rollout.validate`.
        """

    def generate(self, iteration: int, wave: int = 0) -> Futures:
        """Start the iteration's generation, or that of a wave, with what is to be done on its devices meanwhile."""

    def reward(self, iteration: int) -> Futures:
        """Start the reward model's scores, if rewards are waited for before `score`."""

    def score(self, iteration: int) -> Futures:
        """Start the log-probs that the update needs, and else the reward model's scores, unless `generate` does."""

    def update(self, iteration: int, kl_coef: float) -> Futures:
        """Start the iteration's optimizer steps."""

    def save(self, root: str, iteration: int) -> Futures:
        """Start writing the ranks' parts of a checkpoint; with `async_save`, copying them to be written."""

    def finish_save(self, iteration: int) -> Futures:
        """Start waiting for what `save` has begun with `async_save`."""

    def kill(self) -> None:
        """End every worker process at once."""


def make_fleet(config: Config, layout: Layout, model: ModelConfig, device: Device, log_folder: str) -> Fleet:
    """Start the worker processes of a run."""
    kind = IntegratedFleet if layout.integrated else SeparateFleet
    return kind(config, layout, model, device, log_folder)


def watch_over(config: Config, placement: Placement) -> Watch:
    """Over the calls of a run's workers."""
    way_out = "no checkpoints are saved: set actor_config.save to be able to go on after a loss"
    if config.actor.save:
        way_out = (
            "the same command with actor_config.resume=auto goes on from the newest checkpoint in "
            f"{config.actor.save}, on as many devices or in another layout"
        )
    return Watch(config.rl_config.stage_timeout_minutes, [slot.node for slot in placement.slots], way_out)


def _start_rewards(workers: WorkerGroup, config: Config, iteration: int) -> Futures:
    if not scores_before_rewards(config):
        return []
    return workers.start("reward model", iteration + 1, "score", iteration, (REWARD_MODEL,))


class IntegratedFleet:
    """Every device trains and generates, in turn. See `Fleet`."""

    def __init__(self, config: Config, layout: Layout, model: ModelConfig, device: Device, log_folder: str):
        placement = Placement(config, layout, device)
        self.config, self.watch = config, watch_over(config, placement)
        self.workers = WorkerGroup(
            IntegratedWorker, layout.world, 0, self.watch, config, layout, model, device, placement, log_folder
        )

    def start(self, dock: TransferDock, source: Source, stop_tokens: Sequence[int]) -> None:
        futures = self.workers.start("start", 0, "start", self.workers.address(), dock, source, stop_tokens)
        self.watch.wait(futures, self.config.rl_config.start_timeout_minutes)

    def sync_weights(self, version: int) -> list[WorkerReport]:
        return self.watch.wait(self._enter_rollout(version))

    def _enter_rollout(self, version: int) -> Futures:
        return self.workers.start("resharding_to_infer", version + 1, "enter_rollout", version)

    def validate(self, iteration: int, prompts: ray.ObjectRef) -> list[list[list[list[int]]]]:
        self.sync_weights(iteration)
        return self.watch.wait(self.workers.start("validation", iteration, "validate", iteration, prompts))

    def generate(self, iteration: int, wave: int = 0) -> Futures:
        if not scores_while_generating(self.config):
            # the reward model took the engine's place after the wave before
            again = self._enter_rollout(iteration) if wave and uses_reward_model(self.config) else []
            return again + self.workers.start("rollout", iteration + 1, "generate", iteration, wave)
        return self.workers.start("rollout and scoring", iteration + 1, "generate_and_score", iteration)

    def reward(self, iteration: int) -> Futures:
        return _start_rewards(self.workers, self.config, iteration)

    def score(self, iteration: int) -> Futures:
        if scores_while_generating(self.config):
            return []
        stages = stages_beside_rewards(self.config)
        return self.workers.start("scoring", iteration + 1, "score", iteration, stages)

    def update(self, iteration: int, kl_coef: float) -> Futures:
        return self.workers.start("update", iteration + 1, "update", iteration, kl_coef)

    def save(self, root: str, iteration: int) -> Futures:
        return self.workers.start("save", iteration, "save", root, iteration)

    def finish_save(self, iteration: int) -> Futures:
        return self.workers.start("save", iteration, "finish_save")

    def kill(self) -> None:
        self.workers.kill()


class SeparateFleet:
    """Some devices train, others generate, each kind in a world of its own. See `Fleet`."""

    def __init__(self, config: Config, layout: Layout, model: ModelConfig, device: Device, log_folder: str):
        placement = Placement(config, layout, device)
        self.config, self.watch = config, watch_over(config, placement)
        arguments = (self.watch, config, layout, model, device, placement, log_folder)
        self.training = WorkerGroup(TrainingWorker, layout.world, 0, *arguments)
        self.rollout = WorkerGroup(RolloutWorker, layout.rollout_world, layout.world, *arguments)
        board: Any = ray.remote(WeightBoard).options(num_cpus=0)
        self.board = board.remote()

    def start(self, dock: TransferDock, source: Source, stop_tokens: Sequence[int]) -> None:
        futures = self.training.start("start", 0, "start", self.training.address(), dock, source)
        arguments = (self.rollout.address(), dock, source.hf_folder, stop_tokens, self.board)
        futures += self.rollout.start("start", 0, "start", *arguments)
        self.watch.wait(futures, self.config.rl_config.start_timeout_minutes)

    def sync_weights(self, version: int) -> list[WorkerReport]:
        published = self.watch.wait(self.training.start("export_weights", version + 1, "publish_weights", version))
        reports, weights = zip(*published, strict=True)
        put = self.board.put.remote(version, weights[0])  # rollout ranks fetch them when they begin an iteration
        self.watch.wait([self.watch.add(put, Call(-2, "export_weights", version + 1))])
        return list(reports)

    def validate(self, iteration: int, prompts: ray.ObjectRef) -> list[list[list[list[int]]]]:
        self.sync_weights(iteration)
        return self.watch.wait(self.rollout.start("validation", iteration, "validate", iteration, prompts))

    def generate(self, iteration: int, wave: int = 0) -> Futures:
        return self.rollout.start("rollout", iteration + 1, "generate", iteration, wave)

    def reward(self, iteration: int) -> Futures:
        return _start_rewards(self.training, self.config, iteration)

    def score(self, iteration: int) -> Futures:
        stages = stages_beside_rewards(self.config)
        if not stages:
            return []
        return self.training.start("scoring", iteration + 1, "score", iteration, stages)

    def update(self, iteration: int, kl_coef: float) -> Futures:
        return self.training.start("update", iteration + 1, "update", iteration, kl_coef)

    def save(self, root: str, iteration: int) -> Futures:
        return self.training.start("save", iteration, "save", root, iteration)

    def finish_save(self, iteration: int) -> Futures:
        return self.training.start("save", iteration, "finish_save")

    def kill(self) -> None:
        self.training.kill()
        self.rollout.kill()
