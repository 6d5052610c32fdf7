"""Rows with verifiable answers from the procedural generators of reasoning-gym."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from string import Formatter
from typing import Any

from mindspeed_rl.common.errors import DataError


@dataclass(frozen=True)
class TaskOptions:
    """What to generate.

    Attributes:
        task: name of a reasoning-gym data set.
        size: entries to draw; filters make the rows fewer.
        seed: seed of the generator.
        config: settings of the task, such as {"min_digits": 1}.
        prompt_template: format string with `question`, `answer` and the names in the entry's metadata.
        answer_pattern: keep entries whose whole answer matches this regular expression.
        dedupe: keep the first of rows with equal prompts.
        strip_spaces: remove all white space from prompts.
    """

    task: str
    size: int
    seed: int
    config: dict[str, Any]
    prompt_template: str = "{question}"
    answer_pattern: str | None = None
    dedupe: bool = False
    strip_spaces: bool = False


@dataclass(frozen=True)
class TaskRows:
    """Rows {prompt, answer, data_source, extra} and how many entries did not become one, by reason."""

    rows: list[dict[str, Any]]
    dropped: dict[str, int]


def generate_rows(options: TaskOptions) -> TaskRows:
    """Draw entries and make rows of them; each row's own answer is worth 1.0 to the task's checker.

    Entries go through JSON before that is checked, because that is how the checker will get them.

    Raises:
        DataError: unknown task, setting or template name, a bad pattern, or nothing is left.
    """
    if options.size < 1:
        raise DataError(f"size = {options.size}: must be 1 or more")
    dataset, score = _create(options)
    pattern = _compile(options.answer_pattern)
    rows: dict[str, dict[str, Any]] = {}
    dropped = {"answer pattern": 0, "duplicate prompt": 0, "own answer not worth 1.0": 0}
    for index, entry in enumerate(dataset):
        answer = str(entry["answer"])
        if pattern and not pattern.fullmatch(answer):
            dropped["answer pattern"] += 1
            continue
        prompt = _prompt(options, entry)
        key = prompt if options.dedupe else str(index)
        if key in rows:
            dropped["duplicate prompt"] += 1
            continue
        entry = _through_json(options.task, entry)
        if score(answer, entry) != 1.0:
            dropped["own answer not worth 1.0"] += 1
            continue
        extra = {"reasoning_gym": {"dataset": options.task, "entry": entry}}
        rows[key] = {"prompt": prompt, "answer": answer, "data_source": options.task, "extra": extra}
    if not rows:
        raise DataError(f"task {options.task!r}: none of {options.size} entries is left; dropped: {dropped}")
    return TaskRows(list(rows.values()), dropped)


def _create(options: TaskOptions) -> tuple[Any, Any]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if options.task not in DATASETS:
        close = difflib.get_close_matches(options.task, DATASETS, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise DataError(f"task = {options.task!r}: reasoning-gym has no such data set{hint}")
    fields = DATASETS[options.task][1].__dataclass_fields__
    known = [name for name in fields if name not in ("seed", "size")]  # those two are options of their own
    for key in options.config:
        if key not in known:
            raise DataError(f"config {key!r}: not a setting of {options.task}; there are {', '.join(known)}")
    try:
        dataset = reasoning_gym.create_dataset(options.task, seed=options.seed, size=options.size, **options.config)
        return dataset, reasoning_gym.get_score_answer_fn(options.task)
    except (AssertionError, ValueError, TypeError) as error:  # how the tasks refuse settings
        raise DataError(f"task {options.task!r} refuses {options.config}: {error}") from error


def _compile(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern) if pattern is not None else None
    except re.error as error:
        raise DataError(f"answer pattern {pattern!r}: {error}") from error


def _prompt(options: TaskOptions, entry: dict[str, Any]) -> str:
    names = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}
    try:
        for _, name, _, _ in Formatter().parse(options.prompt_template):
            if name is not None and name not in names:
                raise DataError(
                    f"prompt template {options.prompt_template!r}: no {name!r}, there are {sorted(names)}"
                )
        prompt = options.prompt_template.format_map(names)
    except DataError:
        raise
    except (ValueError, LookupError, TypeError) as error:  # a stray brace, or a format that does not fit the value
        raise DataError(f"prompt template {options.prompt_template!r}: {error}; write {{{{ for a brace") from error
    return "".join(prompt.split()) if options.strip_spaces else prompt


def _through_json(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(entry))
    except TypeError as error:
        raise DataError(f"task {task!r}: its entries cannot be stored as JSON: {error}") from error
