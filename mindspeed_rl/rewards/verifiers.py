"""Rules that score one response. Pure functions of a sample, registered by name; imports neither torch nor Ray.

They run in processes of `rewards.manager`, which puts a deadline on them: nothing here guards against hanging. An
answer that cannot be parsed is a wrong answer; an exception is a failure of the verifier, counted as such.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class RewardSample:
    """What a verifier sees: the prompt as given to the model, the text it generated, the reference answer.

    `extra` is the row's `extra` column; `reasoning_gym` finds its task there.
    """

    prompt: str
    response: str
    label: str
    extra: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # of the row: `source_verifier_weight` goes by it


Verifier = Callable[[RewardSample], float]


@dataclass(frozen=True)
class Registered:
    """A verifier and the modules it needs, imported when a process starts so that no deadline pays for them."""

    score: Verifier
    needs: tuple[str, ...] = ()


VERIFIERS: dict[str, Registered] = {}


def verifier(name: str, needs: tuple[str, ...] = ()) -> Callable[[Verifier], Verifier]:
    """Register a verifier under the name that `rl_config.verifier_function` uses.

    Raises:
        ValueError: the name is taken.
    """

    def register(function: Verifier) -> Verifier:
        if name in VERIFIERS:
            raise ValueError(f"verifier {name!r} is registered twice")
        VERIFIERS[name] = Registered(function, needs)
        return function

    return register


# --- answers -------------------------------------------------------------------------------------------------------

_UNWRAP = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
# typography without mathematical meaning
_DROP = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\\(|\\\)|\\\[|\\\]|\$|\s+")
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_BOXED = re.compile(r"\\boxed\s*\{")


def last_boxed(text: str) -> str | None:
    r"""Contents of the last complete `\boxed{…}`, braces balanced; None where there is none."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position].strip()
    return None


def final_answer(text: str) -> str:
    r"""What a response comes to, for a vote: its last `\boxed{…}`, else what follows "Answer:", else its last line.

    Normalised as verifiers do before they compare texts.
    """
    answer = last_boxed(text)
    if answer is None:
        *_, answer = re.split(r"(?i)answer\s*:", text)
        *_, answer = answer.strip().splitlines() or [""]
    return normalise(answer)


def normalise(answer: str) -> str:
    """The answer without typography: spaces, `$`, thousands separators, text wrappers, a final full stop."""
    answer = _UNWRAP.sub(r"\1", answer)
    answer = answer.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\%", "%")
    answer = _DROP.sub("", answer).rstrip(".")
    return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def plainly_equal(answer: str, label: str) -> bool | None:
    """Compare as normalised strings and as decimal numbers; None: different strings of which one is no number."""
    answer, label = normalise(answer), normalise(label)
    if answer == label:
        return answer != ""
    numbers = _number(answer), _number(label)
    return numbers[0] == numbers[1] if None not in numbers else None


def math_equal(answer: str, label: str) -> bool:
    """Mathematical equivalence as math-verify decides it (`1/2` equals `0.5`, `x+y` equals `y+x`)."""
    from math_verify import parse, verify

    return bool(verify(_parse_label(label), parse(answer, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parse_label(label: str) -> Any:
    """A label is parsed once for its whole group of responses."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about deadlines, which our process has
    return parse(label, parsing_timeout=None)


def answers_equal(answer: str, label: str) -> bool:
    """Equal as normalised strings or numbers, or else mathematically equivalent. Nothing equals an empty answer."""
    if not answer.strip():
        return False
    plain = plainly_equal(answer, label)
    return math_equal(f"${answer}$", f"${label}$") if plain is None else plain


# --- verifiers -----------------------------------------------------------------------------------------------------

_THINK_ANSWER = re.compile(r"<think>.*?</think>\s*<answer>(.*?)</answer>", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STEP = re.compile(
    r"\bstep\s+\d+\b|^\s*\d+[.)]\s|^\s*[-*]\s|\b(?:first|second|third|next|then|finally)(?:ly)?,",
    re.IGNORECASE | re.MULTILINE,
)
_DAPO_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_DAPO_TAIL = 300  # characters


@verifier("acc", needs=("math_verify",))
def acc(sample: RewardSample) -> float:
    """Boxed answer equal to the label 1, wrong -0.5, no boxed answer -1."""
    answer = last_boxed(sample.response)
    if answer is None:
        return -1.0
    return 1.0 if answers_equal(answer, sample.label) else -0.5


@verifier("format")
def think_answer_format(sample: RewardSample) -> float:
    """1 where the response contains `<think>…</think> <answer>…</answer>`, else 0."""
    return float(_THINK_ANSWER.search(sample.response) is not None)


@verifier("strict_format")
def strict_format(sample: RewardSample) -> float:
    """1 where the whole response is `<think>…</think> <answer>…</answer>` with each tag exactly once, else -0.5."""
    response = sample.response.strip()
    once = all(response.count(tag) == 1 for tag in _TAGS)
    return 1.0 if once and _THINK_ANSWER.fullmatch(response) else -0.5


@verifier("step")
def step(sample: RewardSample) -> float:
    """Markers of step-by-step reasoning (numbered steps, list items, "first," …) divided by 3, at most 1."""
    return min(1.0, len(_STEP.findall(sample.response)) / 3)


@verifier("base_acc", needs=("math_verify",))
def base_acc(sample: RewardSample) -> float:
    """1 where the response has think and answer parts and the boxed answer in the latter is right, else 0."""
    match = _THINK_ANSWER.search(sample.response)
    answer = last_boxed(match.group(1)) if match else None
    return float(answer is not None and answers_equal(answer, sample.label))


def boxed_and_equal(sample: RewardSample) -> float:
    """1 where the last boxed answer equals the label, else 0."""
    answer = last_boxed(sample.response)
    return float(answer is not None and answers_equal(answer, sample.label))


for _name in ("math_17k_acc", "acc_for_ppo"):
    verifier(_name, needs=("math_verify",))(boxed_and_equal)


@verifier("math_verify", needs=("math_verify",))
def math_verify(sample: RewardSample) -> float:
    """1 where math-verify finds an answer equivalent to the label anywhere in the response, else 0."""
    return float(math_equal(sample.response, f"${sample.label}$"))


@verifier("acc_for_dapo")
def acc_for_dapo(sample: RewardSample) -> float:
    """Last `Answer: …` in the final 300 characters equal to the label (normalised string or number) 1, else -1."""
    answers = _DAPO_ANSWER.findall(sample.response[-_DAPO_TAIL:])
    if not answers:
        return -1.0
    answer = last_boxed(answers[-1]) or answers[-1].strip("* ")
    return 1.0 if plainly_equal(answer, sample.label) else -1.0


@lru_cache
def _reasoning_gym_scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(dataset)


@verifier("reasoning_gym", needs=("reasoning_gym",))
def reasoning_gym_score(sample: RewardSample) -> float:
    """The score that the task's own checker gives: to the last `<answer>…</answer>`, else to the whole response.

    Raises:
        ValueError: the sample does not say which task it is from (`cli/make_data.py` writes that).
    """
    task = sample.extra.get("reasoning_gym")
    if not isinstance(task, dict) or not {"dataset", "entry"} <= task.keys():
        raise ValueError("extra.reasoning_gym = {dataset, entry} is absent")
    answers = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    answer = (answers[-1] if answers else sample.response).strip()
    return float(_reasoning_gym_scorer(task["dataset"])(answer, task["entry"]))
