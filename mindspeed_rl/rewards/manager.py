"""Scores samples with the configured verifiers, in processes that can be killed.

A verifier that hangs, crashes or raises costs its own sample a status, never the run and never a silent 0.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.rewards.verifiers import RewardSample
from mindspeed_rl.rewards.worker import Outcome, Status, VerifierSpec, load_errors, score_chunk, start

START_DEADLINE = 120.0  # seconds to start a process and import what the verifiers need
CHUNKS_PER_PROCESS = 4  # enough to balance the load, few enough to keep messages rare
MAX_POOL_RESTARTS = 3  # times a sample may be on board while the whole pool breaks
CUSTOM = "custom"
SKIPPED = Outcome(Status.SKIPPED)
UNSAID = (Status.OK, Status.SKIPPED)  # nothing went wrong


@dataclass(frozen=True)
class RewardResult:
    """Scores of `B` samples; all lists are in the order of the samples.

    What is not asked for, for rows of a sample's source, has status skipped and value NaN, and is no failure.

    Attributes:
        values: verifier name -> [B] values, NaN where the verifier failed.
        statuses: verifier name -> [B] statuses.
        messages: verifier name -> {sample index: why it failed}.
        total: [B] `reward_scale` times the sum of weight x value over verifiers and reward model; NaN where one with
            a weight other than 0 failed.
        failed: [B] true where `total` is NaN; such samples take no part in training.
    """

    values: dict[str, list[float]]
    statuses: dict[str, list[Status]]
    messages: dict[str, dict[int, str]]
    total: list[float]
    failed: list[bool]

    def metrics(self, count: int | None = None) -> MetricSet:
        """`{verifier}_rewards/mean` over samples with status ok; samples by status, for each verifier and in all.

        `reward_status/{status}` counts (sample, verifier) pairs; `reward_failed_samples` counts samples.

        count: of how many samples, the first ones, means and failures are told; None: all.
        """
        metrics = MetricSet()
        for name, statuses in self.statuses.items():
            scored = [float(status is Status.OK) for status in statuses]
            metrics.mean(f"{name}_rewards/mean", self.values[name][:count], weights=scored[:count])
            counts = Counter(statuses)
            for status in Status:
                if status is Status.SKIPPED and not counts[status]:
                    continue
                metrics.sum(f"reward_status/{status.value}", float(counts[status]), unit="samples")
                metrics.sum(f"{name}_rewards/{status.value}", float(counts[status]), unit="samples")
        metrics.sum("reward_failed_samples", float(sum(self.failed[:count])), unit="samples")
        return metrics


@dataclass(frozen=True)
class _Task:
    """Samples (by index) for one verifier to score in one message."""

    verifier: str
    rows: list[int]
    restarts: int = 0


class RewardManager:
    """Runs verifiers in `verifier_parallel` processes with a deadline of `verifier_timeout` seconds a sample.

    Processes are spawned, because the parent holds threads of Ray and torch. Cheap samples travel in chunks. A chunk
    has the deadline of a single sample and hands back early what it has scored, so that many slow samples are not
    mistaken for one that hangs. The samples of a chunk that was killed are scored again one at a time: a hang costs
    at most two deadlines, and only the sample to blame gets the status. One call of `score` at a time.

    Raises:
        ConfigError: a verifier cannot be loaded (missing function, import error).
    """

    def __init__(self, rl: RLConfig):
        self._weights = {**rl.verifiers, REWARD_MODEL: rl.reward_model_weight}
        self._source_weights, self._scale = rl.source_verifier_weight, rl.reward_scale
        custom = rl.custom_reward_function
        self._specs = [
            VerifierSpec(name, str(Path(custom.path).resolve()), custom.name)
            if name == CUSTOM and custom is not None
            else VerifierSpec(name)
            for name in rl.verifiers
        ]
        self._processes = rl.verifier_parallel
        self._timeout = rl.verifier_timeout
        # a verifier that hangs on everything is to be reported before the stage is given up
        self._call_deadline = rl.stage_timeout_minutes * 60 / 2
        self._pool = self._new_pool()
        try:
            if self._specs:
                self._check_loaded()
        except ConfigError:
            self.close()
            raise

    def score(self, samples: list[RewardSample], scores: Sequence[float] | None = None) -> RewardResult:
        """Score every sample with every verifier.

        scores: [B] a reward model's, which count like a verifier's; NaN: it has none. None: rules alone count.

        Returns within half of `stage_timeout_minutes`, with status timeout for what was not scored by then.
        """
        not_reached = Outcome(Status.TIMEOUT, message="not reached before the deadline of the whole call")
        names = [spec.name for spec in self._specs] + ([] if scores is None else [REWARD_MODEL])
        weights = [
            {name: of_source[name] for name in names if name in of_source}
            for of_source in (self._source_weights.get(sample.source, self._weights) for sample in samples)
        ]
        outcomes = {name: [not_reached if name in wanted else SKIPPED for wanted in weights] for name in names}
        if scores is not None:
            outcomes[REWARD_MODEL] = [
                _of_model(score) if REWARD_MODEL in wanted else SKIPPED
                for score, wanted in zip(scores, weights, strict=True)
            ]
        deadline = time.monotonic() + self._call_deadline
        tasks = self._chunks(weights)
        while tasks and time.monotonic() < deadline:
            tasks = self._run(tasks, samples, outcomes, deadline)
        return self._result(outcomes, weights)

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(self._processes, initializer=start, initargs=(self._specs,), context=_CleanSpawnContext())

    def _check_loaded(self) -> None:
        """Start the pool and see that the verifiers load there."""
        try:
            errors = self._pool.schedule(load_errors).result(timeout=START_DEADLINE)
        except FutureTimeout:
            errors = {CUSTOM: f"not loaded after {START_DEADLINE:.0f} s"}
        except (BrokenProcessPool, ProcessExpired):
            errors = {CUSTOM: "the process died while loading it"}
        if errors:
            key = {CUSTOM: "rl_config.custom_reward_function"}
            violations = [
                Violation(key.get(spec.name, "rl_config.verifier_function"), spec.function or spec.name, message)
                for spec in self._specs
                if (message := errors.get(spec.name))
            ]
            raise ConfigError(
                violations
                or [Violation("rl_config.verifier_function", [each.name for each in self._specs], str(errors))]
            )

    def _chunks(self, weights: Sequence[Mapping[str, float]]) -> list[_Task]:
        count = len(weights)
        size = max(1, -(-count // (self._processes * CHUNKS_PER_PROCESS)))
        tasks = []
        for first in range(0, count, size):
            for spec in self._specs:
                rows = [row for row in range(first, min(first + size, count)) if spec.name in weights[row]]
                tasks += [_Task(spec.name, rows)] if rows else []
        return tasks

    def _run(
        self, tasks: list[_Task], samples: list[RewardSample], outcomes: dict[str, list[Outcome]], deadline: float
    ) -> list[_Task]:
        """Run tasks, write what is settled into `outcomes`, and return what is still to be done."""
        budget = self._timeout / 4
        futures = [
            self._pool.schedule(
                score_chunk, args=(task.verifier, [samples[row] for row in task.rows], budget), timeout=self._timeout
            )
            for task in tasks
        ]
        _, unfinished = wait(futures, timeout=max(0.0, deadline - time.monotonic()))
        if unfinished:
            self._restart()
        left: list[_Task] = []
        broken = False
        for task, future in zip(tasks, futures, strict=True):
            if future in unfinished:
                continue
            error = future.exception()
            if error is None:
                scored = future.result()
                for row, outcome in zip(task.rows, scored, strict=False):
                    outcomes[task.verifier][row] = outcome
                if rest := task.rows[len(scored) :]:
                    left.append(_Task(task.verifier, rest, task.restarts))
                continue
            pool_broke = isinstance(error, BrokenProcessPool)
            broken |= pool_broke
            restarts = task.restarts + pool_broke
            # in a chunk, or in a pool that broke as a whole, the culprit is unknown yet
            if len(task.rows) > 1 or (pool_broke and restarts <= MAX_POOL_RESTARTS):
                left.extend(_Task(task.verifier, [row], restarts) for row in task.rows)
            else:
                outcomes[task.verifier][task.rows[0]] = self._failure(error)
        if broken and not unfinished:
            self._restart()
        return left

    def _failure(self, error: BaseException) -> Outcome:
        if isinstance(error, FutureTimeout):
            return Outcome(Status.TIMEOUT, message=f"no result after {self._timeout:g} s")
        if isinstance(error, ProcessExpired):
            return Outcome(Status.CRASHED, message=f"the process ended with code {error.exitcode}")
        if isinstance(error, BrokenProcessPool):
            return Outcome(Status.CRASHED, message="the process ended")
        return Outcome(Status.ERROR, message=f"{type(error).__name__}: {error}")

    def _restart(self) -> None:
        self.close()
        self._pool = self._new_pool()

    def _result(self, outcomes: dict[str, list[Outcome]], weights: Sequence[Mapping[str, float]]) -> RewardResult:
        total = [
            self._scale * math.fsum(weight * outcomes[name][row].value for name, weight in wanted.items() if weight)
            for row, wanted in enumerate(weights)
        ]
        return RewardResult(
            values={name: [outcome.value for outcome in column] for name, column in outcomes.items()},
            statuses={name: [outcome.status for outcome in column] for name, column in outcomes.items()},
            messages={
                name: {row: outcome.message for row, outcome in enumerate(column) if outcome.status not in UNSAID}
                for name, column in outcomes.items()
            },
            total=total,
            failed=[math.isnan(value) for value in total],
        )


def _of_model(score: float) -> Outcome:
    if math.isfinite(score):
        return Outcome(Status.OK, score)
    return Outcome(Status.NAN, message="no finite score, or more tokens than reward_config.max_length")


_main_lock = threading.Lock()


@contextmanager
def _anonymous_main() -> Iterator[None]:
    """Hide where `__main__` came from: a spawned process would import it, and with it torch, Ray and the trainer."""
    main: Any = sys.modules["__main__"]
    with _main_lock:
        hidden = {name: main.__dict__.pop(name) for name in ("__spec__", "__file__") if name in main.__dict__}
        main.__spec__ = None
        try:
            yield
        finally:
            main.__dict__.update(hidden)


class _CleanSpawnProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _anonymous_main():
            return SpawnProcess._Popen(process_obj)


class _CleanSpawnContext(SpawnContext):
    """The spawn context, without the import of the parent's main module."""

    Process = _CleanSpawnProcess
