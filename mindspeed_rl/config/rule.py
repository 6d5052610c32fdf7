"""What a rule is, and what rules share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.config.schema import Config

Found = Iterator[Violation]
WORLD = "rl_config.actor_resource.num_npus"
INFER_TP = "generate_config.infer_tensor_parallel_size"
OFFLOADS = (
    "offload_train_optimizer",
    "offload_train_grad",
    "offload_train_param",
    "offload_reference",
)
OF_REWARD_MODEL = "offload_reward_model"
FORWARD_SIZES = tuple(f"{model}_forward_micro_batch_size" for model in ("actor", "ref", "critic"))
TP, PP = "actor.tensor_model_parallel_size", "actor.pipeline_model_parallel_size"
MAX_TOKENS, TOTAL = "generate_config.sampling_config.max_tokens", "tools_config.max_total_response_length"
RESPONSE_KEYS = (MAX_TOKENS, "tools_config.tools", TOTAL)  # what `Config.longest_response` reads
CP, EP = "actor.context_parallel_size", "actor.expert_model_parallel_size"


@dataclass(frozen=True)
class Rule:
    """One rule: its name, the keys it reads, and the function that finds violations."""

    name: str
    keys: tuple[str, ...]
    find: Callable[..., Iterable[Violation]]
    needs_model: bool = False


RULES: list[Rule] = []
_FARTHEST = 10_000  # how far from a refused divisor others are looked for: numbers may have any size


def rule(*keys: str, needs_model: bool = False) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """Register a rule that reads `keys`; with `needs_model` it is called with the model's shape too."""

    def register(find: Callable[..., Found]) -> Callable[..., Found]:
        RULES.append(Rule(find.__name__, keys, find, needs_model))
        return find

    return register


def divides(path: str, value: int, divisor_path: str, divisor: int) -> Found:
    """`divisor` must divide `value`; the violation names both keys and near divisors that would do."""
    if value % divisor:
        middle = min(divisor, value)
        window = range(max(1, middle - _FARTHEST), min(value, middle + _FARTHEST) + 1)
        possible = {1, value, *(d for d in window if value % d == 0)}
        near = sorted(possible, key=lambda d: (abs(d - divisor), d))[:3]
        message = f"does not divide {path} = {value}"
        yield Violation(divisor_path, divisor, message, f"possible: {', '.join(map(str, sorted(near)))}")


def is_scored(path: str, metric: str, scorers: Sequence[str]) -> Found:
    """`metric` must be the reward or one of what scores: verifiers that run, or the reward model."""
    names = ("reward", *scorers)
    if metric not in names:
        verifiers = [name for name in scorers if name != REWARD_MODEL]
        message = f"is neither reward nor in verifier_function = {verifiers!r}"
        yield Violation(path, metric, message, nearest(metric, names))


def response_key(cfg: Config) -> str:
    """The key that says how long a response may be."""
    return TOTAL if cfg.tools_config.enabled and cfg.tools_config.max_total_response_length else MAX_TOKENS


def near_multiples(value: int, factor: int) -> str:
    """The multiples of `factor` around `value`, as text."""
    below = value // factor * factor
    return " or ".join(str(number) for number in (below, below + factor) if number)


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint for an unknown name: the one that was meant, or all that are known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
