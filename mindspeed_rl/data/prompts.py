"""Prompts of a data set, tokenised once: these token ids are what generation and training use."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.data.records import Record, find_files, read_records

TOKENISE_AT_ONCE = 1024  # rows


@dataclass(frozen=True)
class PromptSample:
    """One prompt.

    Attributes:
        prompt_ids: [prompt length] token ids.
        prompt_text: the text these ids encode, chat template included.
        label: the reference answer.
        data_source: the row's `data_source`, or the file's name without suffix.
        extra: the row's `extra`, for verifiers.
    """

    prompt_ids: list[int]
    prompt_text: str
    label: str
    data_source: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptDataset:
    """All prompts that fit, in the order of the files; `dropped_too_long` counts those that did not."""

    samples: list[PromptSample]
    dropped_too_long: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> PromptSample:
        return self.samples[index]


@dataclass(frozen=True)
class _Row:
    where: str
    text: str
    label: str
    data_source: str
    extra: dict[str, Any]


def load_prompts(actor: MegatronConfig, rl: RLConfig, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    """Read, template and tokenise the data set; prompts of more than `max_prompt_length` tokens are dropped.

    Raw text gets the tokenizer's special tokens (such as a beginning-of-sequence token) as it defines them; a chat
    template brings its own. A `system_prompt` of the configuration replaces the system message of a row.

    Raises:
        DataError: a file, row, key or value that cannot be used (names file and line), or nothing is left.
    """
    if actor.data_path is None:
        raise DataError("data_path = None: name the jsonl or parquet files with the prompts")
    if actor.apply_chat_template and not tokenizer.chat_template:
        raise DataError(f"apply_chat_template = True, but tokenizer {tokenizer.name_or_path!r} has no chat template")
    files = find_files(actor.data_path)
    rows = [_read_row(record, file, actor, tokenizer) for file in files for record in read_records(file)]
    if not rows:
        raise DataError(f"data_path = {actor.data_path!r}: the data set is empty")
    samples = []
    for first in range(0, len(rows), TOKENISE_AT_ONCE):
        batch = rows[first : first + TOKENISE_AT_ONCE]
        encoded = tokenizer([row.text for row in batch], add_special_tokens=not actor.apply_chat_template)
        for row, ids in zip(batch, encoded["input_ids"], strict=True):
            if not ids:
                raise DataError(f"{row.where}: the prompt {row.text!r} has no tokens")
            if len(ids) <= rl.max_prompt_length:
                samples.append(PromptSample(list(ids), row.text, row.label, row.data_source, row.extra))
    if not samples:
        raise DataError(
            f"data_path = {actor.data_path!r}: all {len(rows)} prompts are longer than "
            f"max_prompt_length = {rl.max_prompt_length} tokens"
        )
    return PromptDataset(samples, dropped_too_long=len(rows) - len(samples))


def _read_row(record: Record, file: Path, actor: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> _Row:
    prompt = record.require(actor.prompt_key, "prompt_key")
    label = record.require(actor.answer_key, "answer_key")
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(f"{record.where}: answer_key = {actor.answer_key!r}: must be text or a number, is {label!r}")
    source = record.row.get("data_source") or file.stem
    return _Row(record.where, _prompt_text(prompt, record, actor, tokenizer), str(label), str(source), _extra(record))


def _prompt_text(prompt: Any, record: Record, actor: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    where = f"{record.where}: prompt_key = {actor.prompt_key!r}"
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in prompt
    )
    if not isinstance(prompt, str) and not is_chat:
        raise DataError(f"{where}: must be text or a list of {{role, content}} messages, is {prompt!r:.80}")
    if not actor.apply_chat_template:
        if is_chat:
            raise DataError(f"{where}: holds chat messages; set apply_chat_template: true")
        return prompt
    messages = prompt if is_chat else [{"role": "user", "content": prompt}]
    if actor.system_prompt is not None:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": actor.system_prompt}, *others]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def _extra(record: Record) -> dict[str, Any]:
    """The `extra` column: an object, or one as JSON text (parquet has no objects of varying shape)."""
    extra = record.row.get("extra")
    if isinstance(extra, str) and extra:
        try:
            extra = json.loads(extra)
        except json.JSONDecodeError as error:
            raise DataError(f"{record.where}: extra: is not valid JSON: {error}") from error
    if extra is not None and extra != "" and not isinstance(extra, dict):
        raise DataError(f"{record.where}: extra: must be an object, is {extra!r:.80}")
    return extra or {}
