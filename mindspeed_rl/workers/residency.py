"""What is on the device of an integrated worker when: in the order that takes the least memory.

`before` and `after` say what comes and goes around each use of the device, `steps` what that makes of an iteration,
`peak` how much memory it takes. Nothing else decides about it; `IntegratedWorker` follows.

Before rollout everything leaves that resharding does not need; then both engines' weights are there at once, which no
order can avoid; the training weights leave before the KV cache, the largest part of rollout, comes. The reference is
alone when its turn is, before the actor's weights are back, and so are the weights of reward model and critic. Only
the KL over the vocabulary needs the reference together with the actor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.config.layout import scored_stages, uses_full_kl
from mindspeed_rl.config.schema import Config

Part = Literal[
    "param",
    "grad",
    "optimizer",
    "reference",
    "reward_model",
    "critic_param",
    "critic_grad",
    "critic_optimizer",
    "rollout_weights",
    "kv_cache",
]
CRITIC: tuple[Part, ...] = ("critic_param", "critic_grad", "critic_optimizer")  # nothing without a critic
ROLLOUT: tuple[Part, ...] = ("rollout_weights", "kv_cache")


@dataclass(frozen=True)
class Step:
    """Parts that come to the device, or leave it, one after the other."""

    action: Literal["onload", "offload"]
    parts: tuple[Part, ...]
    timing: str  # what the time counts as


_SLEEP = Step("offload", ROLLOUT, "resharding_to_train")  # vLLM's sleep takes both away
_REFERENCE, _NO_REFERENCE = Step("onload", ("reference",), "offload"), Step("offload", ("reference",), "offload")
_ACTOR = Step("onload", ("param",), "resharding_to_train")

_BEFORE: dict[str, tuple[Step, ...]] = {
    "resharding": (
        Step("offload", ("grad", "optimizer", *CRITIC), "offload"),
        Step("onload", ("param", "rollout_weights"), "resharding_to_infer"),
    ),
    "rollout": (
        Step("offload", ("param",), "offload"),
        Step("onload", ("kv_cache",), "offload"),
    ),
    "reward_model": (_SLEEP, Step("onload", ("reward_model",), "offload")),
    "reference": (_SLEEP, _REFERENCE),
    "old_log_prob": (_SLEEP, _ACTOR),
    "value": (_SLEEP, Step("onload", ("critic_param",), "offload")),
    "update": (_SLEEP, _ACTOR, Step("onload", ("grad", "optimizer", *CRITIC), "offload")),
}
_AFTER: dict[str, tuple[Step, ...]] = {
    "reward_model": (Step("offload", ("reward_model",), "offload"),),
    "reference": (_NO_REFERENCE,),
    "value": (Step("offload", ("critic_param",), "offload"),),
    "validation": (_SLEEP,),  # as an iteration begins
}


def before(config: Config, use: str) -> tuple[Step, ...]:
    """What brings what a use of the device needs, and makes room for it."""
    if use == "reference" and config.actor.lora_r:  # which is the actor without its adapters
        return _BEFORE["old_log_prob"]
    return (*_BEFORE[use], _REFERENCE) if use == "update" and uses_full_kl(config) else _BEFORE[use]


def after(config: Config, use: str) -> tuple[Step, ...]:
    """What takes away what only that use needs."""
    return (_NO_REFERENCE,) if use == "update" and uses_full_kl(config) else _AFTER.get(use, ())


def may_leave(config: Config, part: Part) -> bool:
    """Whether the configuration wants a part off the device while it is not used."""
    generate = config.generate_config
    wanted = {
        "param": generate.offload_train_param,
        "grad": generate.offload_train_grad,
        "optimizer": generate.offload_train_optimizer,
        "reference": generate.offload_reference,
        "reward_model": generate.offload_reward_model,
    }
    return wanted.get(part.removeprefix("critic_"), True)


def steps(config: Config) -> Iterator[Step | str]:
    """An iteration with blocking stages: uses of the device in their order, and the steps around them."""
    for use in ("resharding", "rollout", *scored_stages(config), "update"):
        yield from before(config, use)
        yield use
        yield from after(config, use)


def peak(sequence: Iterable[Step | str], sizes: Mapping[str, float], present: Iterable[str], config: Config) -> float:
    """Most memory that is taken at once.

    Args:
        sequence: steps and uses in their order.
        sizes: of parts, and what uses take beside them (activations, buckets); what is not there is 0.
        present: parts that are there at the beginning.
        config: says what may leave.
    """
    there = set(present)
    largest = sum(sizes.get(part, 0.0) for part in there)
    for step in sequence:
        if isinstance(step, str):
            largest = max(largest, sum(sizes.get(part, 0.0) for part in there) + sizes.get(f"use {step}", 0.0))
            continue
        for part in step.parts:
            if step.action == "onload":
                there.add(part)
            elif may_leave(config, part):
                there.discard(part)
            largest = max(largest, sum(sizes.get(part, 0.0) for part in there))
    return largest
