"""Rules of what is recorded: `profiler`."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.rule import WORLD, Found, rule
from mindspeed_rl.config.schema import Config, ProfilerConfig


@rule("profiler", "actor.train_iters")
def profiled_steps_come(cfg: Config) -> Found:
    """Beyond the last one there is nothing to record."""
    for step in cfg.profiler.steps:
        if step > cfg.actor.train_iters:
            message = f"train_iters = {cfg.actor.train_iters} is the last step"
            yield Violation("profiler.steps", step, message, f"name steps from 1 to {cfg.actor.train_iters}")


@rule("profiler", WORLD, "rl_config.rollout_resource")
def profiled_ranks_exist(cfg: Config) -> Found:
    own = cfg.rl_config.rollout_resource
    workers = cfg.rl_config.actor_resource.num_npus + (own.num_npus if own else 0)
    for rank in cfg.profiler.ranks:
        if rank >= workers:
            hint = f"name ranks from 0 to {workers - 1}"
            yield Violation("profiler.ranks", rank, f"there are {workers} workers", hint)


@rule("profiler")
def profiler_records_something(cfg: Config) -> Found:
    profiler, default = cfg.profiler, ProfilerConfig()
    if profiler.steps:
        for key in ("ranks", "what"):
            if not getattr(profiler, key):
                hint = "name some, or remove profiler.steps"
                yield Violation(f"profiler.{key}", [], "is empty: nothing of the steps is recorded", hint)
        return
    for key in ProfilerConfig.model_fields:
        if (value := getattr(profiler, key)) != getattr(default, key):
            hint = "set profiler.steps, or remove it"
            yield Violation(f"profiler.{key}", value, "has no effect: profiler.steps names no steps", hint)
