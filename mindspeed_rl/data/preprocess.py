"""From a published data set to the columns training reads: prompt, answer, data_source, extra.

Driven by a named YAML (`configs/datasets/<name>.yaml`) with the keys of `PreprocessConfig`. Text stays text: prompts
are tokenised when training loads them, by the tokenizer that trains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow
import pyarrow.parquet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.common.files import replacing
from mindspeed_rl.data.records import Record, find_files, read_records
from mindspeed_rl.data.tokenizer import load_tokenizer

Message = dict[str, str]


def _one_group(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    if groups != 1:
        raise ValueError(f"must have one group, the answer; it has {groups}")
    return pattern


@dataclass(frozen=True)
class PromptType:
    """How a question is put: as chat messages with this system message, and this text after the question."""

    system: str = ""
    suffix: str = ""


_BOXED = r"Reason step by step and put the final answer within \boxed{}."
# `empty` leaves plain text. The others give chat messages, for a run with `apply_chat_template: true`.
PROMPT_TYPES: dict[str, PromptType | None] = {
    "empty": None,
    "qwen": PromptType(),
    "qwen_boxed": PromptType(suffix="\n" + _BOXED),
    "qwen_r1": PromptType(
        system=(
            "You are a careful assistant. Think about the question first, then answer it. Write your thoughts "
            "between <think> and </think> and what you tell the user between <answer> and </answer>, like this: "
            "<think> thoughts </think> <answer> answer </answer>."
        ),
        suffix=r" Put the final answer within \boxed{}.",
    ),
}


def _known_prompt_type(name: str) -> str:
    if name not in PROMPT_TYPES:
        raise ValueError(f"no such prompt type; known are {', '.join(PROMPT_TYPES)}")
    return name


class MapKeys(BaseModel):
    """Columns of the input; a dot reaches into a column (`reward_model.ground_truth`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = "prompt"
    query: str = Field("", description="column appended to the prompt on a new line; empty: none")
    response: str = Field("answer", description="column of the reference answer")


class PreprocessConfig(BaseModel):
    """Keys of a data set's YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: str | list[str] = Field(description="jsonl, json or parquet files")
    output_prefix: str = Field(description="the result is <output_prefix>.parquet, and this is its `data_path`")
    handler_name: Literal[
        "AlpacaStyleInstructionHandler", "R1AlpacaStyleInstructionHandler", "SharegptStyleInstructionHandler"
    ] = Field("AlpacaStyleInstructionHandler", description="layout of a row: columns, or a list of chat turns")
    map_keys: MapKeys = MapKeys()
    prompt_type: Annotated[str, AfterValidator(_known_prompt_type)] = Field(
        "empty", description="how the question is put, see PROMPT_TYPES"
    )
    answer_pattern: Annotated[str, AfterValidator(_one_group)] | None = Field(
        None, description="regular expression whose group in its last match within the response is the answer"
    )
    data_source: str | None = Field(None, description="name in metrics; null: the row's own, else the YAML's name")
    seq_length: Annotated[int, Field(ge=1)] | None = Field(None, description="longer prompts, in tokens, are dropped")
    tokenizer_name_or_path: str | None = Field(
        None, validate_default=True, description="Hugging Face folder; counts tokens for seq_length"
    )

    @field_validator("tokenizer_name_or_path")
    @classmethod
    def _with_seq_length(cls, value: str | None, info: ValidationInfo) -> str | None:
        # a refused seq_length is not in `data`: one complaint about it is enough
        if "seq_length" in info.data and (info.data["seq_length"] is None) != (value is None):
            raise ValueError(f"seq_length = {info.data['seq_length']!r}: set both, to drop long prompts, or neither")
        return value


@dataclass(frozen=True)
class PreprocessResult:
    """Where the rows are and how many there are."""

    file: Path
    rows: int
    dropped_too_long: int


def preprocess(config: PreprocessConfig, name: str) -> PreprocessResult:
    """Read, map and write one data set; the output appears under its name only when it is complete.

    Raises:
        DataError: an input that cannot be used (names file and line), or nothing is left.
        OSError: the output cannot be written.
    """
    handler = HANDLERS[config.handler_name]
    rows = []
    for file in find_files(config.input):
        for record in read_records(file, dictionaries=handler is not _sharegpt):
            messages, response = handler(record, config.map_keys)
            row = record.row if isinstance(record.row, dict) else {}
            extra = row.get("extra")
            rows.append(
                {
                    "prompt": _put_question(messages, PROMPT_TYPES[config.prompt_type], record),
                    "answer": _find_answer(response, config.answer_pattern, record),
                    "data_source": str(config.data_source or row.get("data_source") or name),
                    "extra": extra if isinstance(extra, str) else json.dumps(extra or {}),
                }
            )
    if not rows:
        raise DataError(f"input = {config.input!r}: the data set is empty")
    kept = [row for row, fits in zip(rows, _which_fit(rows, config), strict=True) if fits]
    if not kept:
        raise DataError(f"input = {config.input!r}: all {len(rows)} prompts exceed seq_length = {config.seq_length}")
    output = Path(f"{config.output_prefix}.parquet")
    with replacing(output) as unfinished:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(kept), unfinished)
    return PreprocessResult(output, len(kept), len(rows) - len(kept))


def _columns(record: Record, keys: MapKeys) -> tuple[list[Message], Any]:
    """A row with a column for the question (text, or chat messages), perhaps one for its input, and the answer."""
    prompt = record.require(keys.prompt, "map_keys.prompt")
    query = record.get(keys.query) if keys.query else None
    response = record.require(keys.response, "map_keys.response")
    if isinstance(prompt, list):
        if query:
            raise DataError(f"{record.where}: map_keys.query = {keys.query!r}: chat messages take no query")
        return [_message(turn, record) for turn in prompt], response
    text = f"{prompt}\n{query}" if query else str(prompt)
    return [{"role": "user", "content": text}], response


def _sharegpt(record: Record, keys: MapKeys) -> tuple[list[Message], Any]:
    """A row that is a list of turns, or has one in a column: questions, and last the answer of the assistant.

    `map_keys.response` names the field of the last turn that holds the answer (`ground_truth.value`).
    """
    turns = record.row if isinstance(record.row, list) else record.require(keys.prompt, "map_keys.prompt")
    if not isinstance(turns, list) or len(turns) < 2 or not isinstance(turns[-1], dict):
        raise DataError(f"{record.where}: must be a list of two turns or more, is {turns!r:.80}")
    response = Record(turns[-1], record.where).require(keys.response, "map_keys.response")
    return [_message(turn, record) for turn in turns[:-1]], response


Handler = Callable[[Record, MapKeys], tuple[list[Message], Any]]
HANDLERS: dict[str, Handler] = {
    "AlpacaStyleInstructionHandler": _columns,
    "R1AlpacaStyleInstructionHandler": _columns,
    "SharegptStyleInstructionHandler": _sharegpt,
}
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def _message(turn: Any, record: Record) -> Message:
    """{role, content} from either of the two spellings in use."""
    if isinstance(turn, dict):
        role = _ROLES.get(str(turn.get("role", turn.get("from"))))
        content = turn.get("content", turn.get("value"))
        if role is not None and isinstance(content, str):
            return {"role": role, "content": content}
    raise DataError(f"{record.where}: a turn needs role and content (or from and value), is {turn!r:.80}")


def _put_question(messages: list[Message], kind: PromptType | None, record: Record) -> str | list[Message]:
    if kind is None:
        if len(messages) != 1:
            raise DataError(f"{record.where}: prompt_type = 'empty' takes one question, found {len(messages)} turns")
        return messages[0]["content"]
    if kind.system:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": kind.system}, *others]
    last = messages[-1]
    return [*messages[:-1], {"role": last["role"], "content": last["content"] + kind.suffix}]


def _find_answer(response: Any, pattern: str | None, record: Record) -> str:
    if isinstance(response, bool) or not isinstance(response, str | int | float):
        raise DataError(f"{record.where}: map_keys.response: must be text or a number, is {response!r:.80}")
    if pattern is None:
        return str(response)
    found = re.findall(pattern, str(response))
    if not found:
        raise DataError(f"{record.where}: answer_pattern = {pattern!r}: not found in {response!r:.80}")
    return str(found[-1]).strip()


def _which_fit(rows: list[dict[str, Any]], config: PreprocessConfig) -> Iterator[bool]:
    if config.seq_length is None or config.tokenizer_name_or_path is None:
        yield from (True for _ in rows)
        return
    tokenizer = load_tokenizer(config.tokenizer_name_or_path)
    is_chat = PROMPT_TYPES[config.prompt_type] is not None
    if is_chat and not tokenizer.chat_template:
        raise DataError(
            f"prompt_type = {config.prompt_type!r}: tokenizer {config.tokenizer_name_or_path!r} has no chat template"
        )
    for row in rows:
        text = row["prompt"]
        if is_chat:
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        yield len(tokenizer(text, add_special_tokens=not is_chat)["input_ids"]) <= config.seq_length
