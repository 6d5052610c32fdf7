"""Prompts of a data set, tokenised once: these token ids are what generation and training use."""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.data.chat import Messages, is_message, read_template, render, with_system_prompt
from mindspeed_rl.data.custom import custom_records
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
        chat: the messages that the chat template made the text of, whole also where the text was shortened; none
            where there was no template.
    """

    prompt_ids: list[int]
    prompt_text: str
    label: str
    data_source: str
    extra: dict[str, Any] = field(default_factory=dict)
    chat: Messages = ()

    @property
    def messages(self) -> Messages:
        """The prompt as a chat."""
        return self.chat or [{"role": "user", "content": self.prompt_text}]


class PromptDataset:
    """All prompts that are used, in the order of the files, token ids in one array.

    Attributes:
        dropped_too_long: how many were left out as longer than `max_prompt_length`.
        truncated: how many were shortened to it.
        sources_read: where the rows come from, those that were left out, too.
        is_whole: all rows have been read; false where there were enough before.
    """

    def __init__(
        self,
        rows: Sequence[_Row],
        dropped_too_long: int = 0,
        truncated: int = 0,
        sources_read: Set[str] = frozenset(),
        is_whole: bool = True,
    ):
        self.dropped_too_long, self.truncated = dropped_too_long, truncated
        self.sources_read, self.is_whole = sources_read | {row.data_source for row in rows}, is_whole
        self._bounds = np.cumsum([0, *(len(row.ids) for row in rows)])
        self._ids = np.concatenate([row.ids for row in rows])
        # what is in the one array need not be kept in many
        self._rows = [replace(row, ids=_NOTHING) for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptSample:
        row = self._rows[index]
        first, end = self._bounds[index % len(self)], self._bounds[index % len(self) + 1]
        return PromptSample(self._ids[first:end].tolist(), row.text, row.label, row.data_source, row.extra, row.chat)

    @property
    def row_sources(self) -> list[str]:
        """Of each prompt, where it comes from."""
        return [row.data_source for row in self._rows]

    @property
    def samples(self) -> list[PromptSample]:
        """All of them, made for the caller."""
        return [self[index] for index in range(len(self))]


_NOTHING = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class _Row:
    where: str
    text: str
    chat: Messages
    label: str
    data_source: str
    extra: dict[str, Any]
    ids: np.ndarray  # [prompt length] int32


def load_prompts(
    actor: MegatronConfig,
    rl: RLConfig,
    tokenizer: PreTrainedTokenizerBase,
    key: str = "data_path",
    tools: Sequence[dict[str, Any]] = (),
) -> PromptDataset:
    """Read, template and tokenise the data set; longer prompts than `max_prompt_length` as `truncation` says.

    Raw text gets the tokenizer's special tokens (such as a beginning-of-sequence token) as it defines them; a chat
    template brings its own. A `system_prompt` of the configuration replaces the system message of a row. The text of
    a prompt that is shortened is that of its remaining tokens. Messages call what is read `key`.
    The chat template announces `tools`, given by their schemas.

    Raises:
        DataError: a file, row, key or value that cannot be used (names file and line), or nothing is left.
        ConfigError: the user's data set cannot be loaded.
    """
    if actor.data_path is None:
        raise DataError(f"{key} = None: name the jsonl or parquet files with the prompts")
    if actor.apply_chat_template and not (actor.chat_template or tokenizer.chat_template):
        raise DataError(f"apply_chat_template = True, but tokenizer {tokenizer.name_or_path!r} has no chat template")
    encode = _Encoder(actor, tokenizer, tools)
    rows, dropped, truncated, read, sources, is_whole = list[_Row](), 0, 0, 0, set[str](), True
    for row in encoded(encode, records(actor, tokenizer, key), actor.num_workers):
        read += 1
        sources.add(row.data_source)
        excess = len(row.ids) - rl.max_prompt_length
        if excess > 0:
            if actor.truncation == "error":
                what = f"the prompt has {len(row.ids)} tokens, max_prompt_length = {rl.max_prompt_length}"
                raise DataError(f"{row.where}: {what}; see truncation for what else can be done")
            if actor.truncation == "drop":
                dropped += 1
                continue
            truncated += 1
            ids = shorten(row.ids, rl.max_prompt_length, actor.truncation)
            row = replace(row, ids=ids, text=str(tokenizer.decode(ids)))
        rows.append(row)
        if len(rows) == actor.train_max_samples:
            is_whole = False
            break
    if not read:
        raise DataError(f"{key} = {actor.data_path!r}: the data set is empty")
    if not rows:
        raise DataError(
            f"{key} = {actor.data_path!r}: all {read} prompts are longer than "
            f"max_prompt_length = {rl.max_prompt_length} tokens"
        )
    return PromptDataset(rows, dropped, truncated, sources, is_whole)


def shorten(ids: np.ndarray, length: int, truncation: str) -> np.ndarray:
    """So many of the ids: the last (`left`), the first (`right`), or half of them at each end (`middle`)."""
    if truncation == "left":
        return ids[len(ids) - length :]
    if truncation == "right":
        return ids[:length]
    head = length - length // 2
    return np.concatenate((ids[:head], ids[len(ids) - length // 2 :]))


def records(actor: MegatronConfig, tokenizer: PreTrainedTokenizerBase, key: str) -> Iterator[tuple[Record, str]]:
    """Rows, each with the name of the source that it has if it does not say one."""
    assert actor.data_path is not None
    files = find_files(actor.data_path, key)
    if actor.custom_dataset is not None:
        yield from ((record, files[0].stem) for record in custom_records(actor, files, tokenizer))
        return
    for file in files:
        yield from ((record, file.stem) for record in read_records(file))


class _Encoder:
    """From rows as they are in files to tokens; it and its results travel between processes."""

    def __init__(self, actor: MegatronConfig, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]):
        self.actor, self.tokenizer, self.tools = actor, tokenizer, list[Any](tools)
        self.template = read_template(actor.chat_template)

    def __call__(self, records: Sequence[tuple[Record, str]]) -> list[_Row]:
        rows = [self._read(record, source) for record, source in records]
        encoded = self.tokenizer([row.text for row in rows], add_special_tokens=not self.actor.apply_chat_template)
        for row, ids in zip(rows, encoded["input_ids"], strict=True):
            if not ids:
                raise DataError(f"{row.where}: the prompt {row.text!r} has no tokens")
        of_rows = zip(rows, encoded["input_ids"], strict=True)
        return [replace(row, ids=np.array(ids, dtype=np.int32)) for row, ids in of_rows]

    def _read(self, record: Record, file_source: str) -> _Row:
        prompt = record.require(self.actor.prompt_key, "prompt_key")
        text, chat = self._text(prompt, f"{record.where}: prompt_key = {self.actor.prompt_key!r}")
        return _Row(record.where, text, chat, *_labels(record, file_source, self.actor), _NOTHING)

    def _text(self, prompt: Any, where: str) -> tuple[str, Messages]:
        """The prompt, and the messages that it was made of, if there were any."""
        is_chat = isinstance(prompt, list) and all(map(is_message, prompt))
        if not isinstance(prompt, str) and not is_chat:
            raise DataError(f"{where}: must be text or a list of {{role, content}} messages, is {prompt!r:.80}")
        if not self.actor.apply_chat_template:
            if is_chat:
                raise DataError(f"{where}: holds chat messages; set apply_chat_template: true")
            return prompt, ()
        messages = prompt if is_chat else [{"role": "user", "content": prompt}]
        messages = with_system_prompt(messages, self.actor.system_prompt)
        settings = {"tools": self.tools or None, "add_generation_prompt": True, **self.actor.chat_template_kwargs}
        refusal = f"{where}: the chat template refuses it"
        return render(self.tokenizer, messages, self.template, refusal, **settings), messages


def _labels(record: Record, file_source: str, actor: MegatronConfig) -> tuple[str, str, dict[str, Any]]:
    """Reference answer, data source and what verifiers get besides."""
    label = record.require(actor.answer_key, "answer_key")
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        message = f"must be text or a number, is {label!r}"
        raise DataError(f"{record.where}: answer_key = {actor.answer_key!r}: {message}")
    return str(label), str(record.get(actor.data_source_key) or file_source), _extra(record)


def read_row(record: Record, file_source: str, actor: MegatronConfig) -> PromptSample:
    """A row without tokens, its prompt as it is: text, or messages one after the other.

    Raises:
        DataError: a column that cannot be used; names the place.
    """
    prompt = record.require(actor.prompt_key, "prompt_key")
    if not isinstance(prompt, str | list):
        message = f"must be text or a list of messages, is {prompt!r:.80}"
        raise DataError(f"{record.where}: prompt_key = {actor.prompt_key!r}: {message}")
    if not isinstance(prompt, str):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, dict))
    return PromptSample([], prompt, *_labels(record, file_source, actor))


Encode = Callable[[Sequence[tuple[Record, str]]], list[Any]]  # rows as they are in files -> with tokens
_encoder: Encode | None = None  # of a process that encodes for another


def _take_encoder(encoder: Encode) -> None:
    global _encoder
    _encoder = encoder


def _encode_here(records: Sequence[tuple[Record, str]]) -> list[Any]:
    assert _encoder is not None, "the process was started with one"
    return _encoder(records)


def encoded(encode: Encode, records: Iterator[tuple[Record, str]], workers: int) -> Iterator[Any]:
    """Rows in order, encoded here or in so many processes."""
    chunks = iter(lambda: list(islice(records, TOKENISE_AT_ONCE)), [])
    if workers == 1:
        yield from chain.from_iterable(map(encode, chunks))
        return
    context = multiprocessing.get_context("spawn")  # the tokenizer's threads would not survive a fork
    with ProcessPoolExecutor(workers, context, initializer=_take_encoder, initargs=(encode,)) as pool:
        ahead = deque(pool.submit(_encode_here, chunk) for chunk in islice(chunks, 2 * workers))
        while ahead:  # a bounded number of chunks is on its way
            rows = ahead.popleft().result()
            ahead.extend(pool.submit(_encode_here, chunk) for chunk in islice(chunks, 1))
            yield from rows


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
