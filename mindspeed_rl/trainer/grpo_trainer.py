"""GRPO (Shao et al. 2024, DeepSeekMath, section 4), one method a stage, top to bottom.

The driver holds no samples: prompts go into the TransferDock, and every stage claims what it needs from there.
With `staleness` k, up to k iterations after the one being trained are started already: rollout, on devices of its
own, works them off in order and begins each with the newest weights there are. With `filter_groups_enable` an
iteration takes prompts in waves until enough groups are worth training on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_rl.algorithms.kl import make_kl_controller
from mindspeed_rl.checkpoint.state import CheckpointReader
from mindspeed_rl.config.layout import shares_critic, uses_critic
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.sampler import permutation
from mindspeed_rl.metrics.loggers import MetricLogger
from mindspeed_rl.trainer.inputs import Inputs, generation_keys
from mindspeed_rl.trainer.report import StepReport
from mindspeed_rl.trainer.saver import Saver
from mindspeed_rl.trainer.trace import Trace
from mindspeed_rl.trainer.validation import Validation
from mindspeed_rl.transfer_dock.spec import TransferDock
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.group import Call
from mindspeed_rl.workers.stages import selection

DOCK = "dock.pkl"  # file of a checkpoint: responses that are not trained on yet, as a pickled `DockSnapshot`


class GRPOTrainer:
    """Runs `train_iters` iterations.

    Args:
        config: the run's configuration.
        inputs: data, layout, checkpoints: what the run reads and where it goes on.
        fleet: the workers, started.
        saver: takes checkpoints; None: there are none.
        reward: handle of the reward worker (a Ray actor).
        dock: the sample plane between all of them.
        loggers: where metrics go.
        validation: what `val_data_path` says; None: nothing.
        trace: where spans of time go; None: nowhere.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        fleet: Fleet,
        saver: Saver | None,
        reward: Any,
        dock: TransferDock,
        loggers: Sequence[MetricLogger],
        validation: Validation | None = None,
        trace: Trace | None = None,
    ):
        self.config, self.rl = config, config.rl_config
        self.inputs, self.layout, self.sampler = inputs, inputs.layout, inputs.sampler
        self.fleet, self.saver, self.reward, self.dock, self.loggers = fleet, saver, reward, dock, loggers
        self.watch, self.validation, self.trace = fleet.watch, validation, trace
        self.kl_controller = make_kl_controller(self.rl)
        self.iteration = inputs.completed  # the next one to run, counted from 0; users see steps, counted from 1
        self._carried = 0  # prompts that the next iteration to start has from its predecessor
        self._begun = self.iteration - 1  # the last one that is open in the dock
        if inputs.state is not None:
            self._load_state(inputs.state)
        self._next = self.iteration  # the next one to start
        self._started: dict[int, list[Any]] = {}  # iteration -> calls that produce its samples
        self._positions: dict[int, dict[str, Any]] = {}  # iteration -> state of the sampler before it was started
        self._waited: dict[str, float] = {}  # seconds that stages have waited for the dock so far

    def fit(self) -> None:
        """Train until `train_iters` iterations are complete."""
        if self.iteration == 0 and (validated := self._validate_if_due()):
            for logger in self.loggers:
                logger.log(0, validated)
        while self.iteration < self.config.actor.train_iters:
            kl_coef = self.kl_controller.value
            report = StepReport(self.config, self.layout, self.inputs.model, self.iteration, self.trace)
            with report.timings("all"):
                self._train_iteration(kl_coef, report)
            self.iteration += 1
            self._save_if_due(report)
            self._log(report, kl_coef, self._validate_if_due())
        if self.saver:
            self.saver.wait()

    def _train_iteration(self, kl_coef: float, report: StepReport) -> None:
        report.add(self.fleet.sync_weights(self.iteration))
        self.dock.advance(self.iteration)
        while self._next <= min(self.iteration + self.rl.staleness, self.config.actor.train_iters - 1):
            self._start_iteration(self._next)
            self._next += 1
        samples = self._started.pop(self.iteration)
        if self.rl.filter_groups_enable:
            self._sample_until_enough(samples, report)
            samples = [] if self.rl.blocking else [self._start_advantages(self.iteration)]
        elif self.rl.blocking:
            self._finish_samples(samples, report)
        if self.rl.blocking:
            report.add(self.watch.wait(self.fleet.score(self.iteration)))
            report.add(self.watch.wait([self._start_advantages(self.iteration)]))
        else:
            report.add(self.watch.wait(samples + self.fleet.score(self.iteration)))
        report.add(self.watch.wait(self.fleet.update(self.iteration, kl_coef)))
        if self.iteration >= self.rl.critic_warmup:
            self.kl_controller.update(report.kl, self.layout.sequences_per_iteration)
        self._end_iteration()

    def _start_iteration(self, iteration: int) -> None:
        """Put prompts and have them answered; without `blocking`, rewards and advantages follow on their own."""
        self._positions[iteration] = self.sampler.state_dict()
        if self._begun < iteration:
            self._begin(iteration)
        # with partial rollout, what was carried over is part of the number
        fresh = self.layout.prompts_in_generation - (0 if self.rl.filter_groups_enable else self._carried)
        self._put_prompts(iteration, self._carried, fresh)
        self._started[iteration] = self._start_samples(iteration)
        if not self.rl.blocking and not self.rl.filter_groups_enable:
            self._started[iteration].append(self._start_advantages(iteration))

    def _start_samples(self, iteration: int, wave: int = 0) -> list[Any]:
        rewards = [] if self.rl.blocking else [self._start_rewards(iteration)]
        return rewards + self.fleet.generate(iteration, wave) + self.fleet.reward(iteration)

    def _finish_samples(self, samples: list[Any], report: StepReport) -> None:
        report.add(self.watch.wait(samples))
        if self.rl.blocking:
            report.add(self.watch.wait([self._start_rewards(self.iteration)]))

    def _sample_until_enough(self, samples: list[Any], report: StepReport) -> None:
        """Wait for responses and rewards, and have further prompts answered while too few groups qualify.

        Dynamic sampling (Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2), with an end: see
        `filter_groups_max_batches`.
        """
        self._finish_samples(samples, report)
        waves, prompts = 1, self.layout.prompts_per_iteration
        while self._groups["selected"] < prompts:
            if waves == self.rl.filter_groups_max_batches:
                self.dock.fill(self.iteration)
                break
            self.dock.extend(self.iteration, prompts)
            self._put_prompts(self.iteration, self._carried + waves * prompts, prompts)
            self._finish_samples(self._start_samples(self.iteration, waves), report)
            waves += 1
        report.metrics.sum("rollout/waves", float(waves))
        report.metrics.sum("reward/filled_groups", float(self._groups["filled"]), unit="groups")

    @property
    def _groups(self) -> dict[str, int]:
        return self.dock.stats()["groups"][self.iteration]

    def _put_prompts(self, iteration: int, first: int, count: int) -> None:
        """Put so many prompts as the iteration's `first` and following, one row for each sample to be generated."""
        group = self.rl.n_samples_per_prompt
        samples = [self.inputs.dataset[index] for index in self.sampler.take(count)]
        ids = [torch.tensor(sample.prompt_ids) for sample in samples]
        rows = range(len(samples) * group)
        columns: dict[str, list[Any]] = {
            "prompt_ids": [ids[row // group] for row in rows],
            "sample": [samples[row // group] for row in rows],
        }
        self.dock.put(iteration, [first * group + row for row in rows], columns)

    def _begin(self, iteration: int, carry_from: int | None = None) -> int:
        """Open an iteration in the dock; returns how many prompts it has from another."""
        group, prompts = self.rl.n_samples_per_prompt, self.layout.prompts_per_iteration
        block, orders = self.rl.mini_batch_size * group, {}
        if self.rl.shuffle_mini_batch:
            shuffled = permutation(prompts, self.config.actor.seed, iteration)
            orders["update"] = [prompt * group + sample for prompt in shuffled for sample in range(group)]
        self._begun = iteration
        in_generation, chosen = self.layout.prompts_in_generation, selection(self.config)
        return self.dock.begin(iteration, in_generation, group, block, orders, chosen, carry_from)

    def _end_iteration(self) -> None:
        """Free the iteration. If it had a choice, the next one begins with what it has not used."""
        if selection(self.config) is not None:
            self._carried = self._begin(self.iteration + 1, carry_from=self.iteration)
        self.dock.clear(self.iteration)
        del self._positions[self.iteration]

    def _start_rewards(self, iteration: int) -> Any:
        return self.watch.add(self.reward.score.remote(iteration), Call(-1, "score", iteration + 1))

    def _start_advantages(self, iteration: int) -> Any:
        future = self.reward.compute_advantages.remote(iteration, self.kl_controller.value)
        return self.watch.add(future, Call(-1, "compute_advantages", iteration + 1))

    def _validate_if_due(self) -> dict[str, float]:
        if self.validation is None or not self.validation.is_due(self.iteration):
            return {}
        metrics, responses = self.validation.run(self.iteration)
        if shown := responses[: self.rl.log_val_generations]:
            for logger in self.loggers:
                logger.log_samples(self.iteration, shown, "val_samples")
        return metrics

    def _log(self, report: StepReport, kl_coef: float, validated: dict[str, float]) -> None:
        waited = self.dock.stats()["wait_seconds"]
        for stage, seconds in waited.items():
            report.dock_wait[stage] = seconds - self._waited.get(stage, 0.0)
        self._waited = waited
        metrics = {**report.finalize(kl_coef), **validated}
        for logger in self.loggers:
            logger.log(self.iteration, metrics)
        interval = self.rl.sample_log_interval
        if interval and (self.iteration == 1 or self.iteration % interval == 0):
            for logger in self.loggers:
                logger.log_samples(self.iteration, report.samples)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save_if_due(self, report: StepReport) -> None:
        actor = self.config.actor
        due = self.iteration % actor.save_interval == 0 or self.iteration == actor.train_iters
        if self.saver and due:
            with report.timings("save"):
                carried = {DOCK: self.dock.snapshot()} if self._carried else None
                self.saver.save(self.iteration, self.state_dict(), carried)
        elif self.saver:
            self.saver.check()

    def _load_state(self, state: dict[str, Any]) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])
        self._carried = state.get("carried", 0)
        if self._carried:
            self._begun = self.iteration
            assert self.inputs.source.state is not None, "the driver's state comes with that of the ranks"
            self.dock.restore(CheckpointReader(self.inputs.source.state).attachment(DOCK))

    def state_dict(self) -> dict[str, Any]:
        """What the driver must remember to go on exactly: position in the data, KL coefficient.

        The position is that of the next iteration to train. What was generated beyond it is not kept: a run that
        goes on draws those prompts again, and has them answered by the weights of the checkpoint.
        """
        actor = self.config.actor
        saved = {"optimizer": not actor.no_save_optim, "rng": not actor.no_save_rng}
        return {
            "iteration": self.iteration,
            "sampler": self._positions.get(self.iteration) or self.sampler.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "carried": self._carried,
            "generation_keys": generation_keys(self.config),
            "start_weights": self.inputs.source.weights,
            "lora": actor.lora_settings,
            "critic": uses_critic(self.config),
            "critic_shares_actor": shares_critic(self.config),
            "saved": [part for part, is_saved in saved.items() if is_saved],
        }
