"""Rows to learn from, tokenised once: a prompt and one response (SFT), or a chosen and a rejected one (DPO).

A prompt is tokenised as for generation, alone, and so is each stretch that follows it: what is learned are the ids
that the model would have to generate, with the end-of-sequence token as their last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.schema import Config, MegatronConfig
from mindspeed_rl.data.chat import Messages, is_message, read_template, render, with_system_prompt
from mindspeed_rl.data.prompts import encoded, records
from mindspeed_rl.data.records import Record


@dataclass(frozen=True)
class Response:
    """What follows a prompt, as far as the sequence goes."""

    ids: np.ndarray  # [response length] int32
    learned: np.ndarray  # [response length] bool: the token counts in the loss

    def first(self, count: int) -> Response:
        """So many tokens of it."""
        return Response(self.ids[:count], self.learned[:count])


@dataclass(frozen=True)
class SupervisedRow:
    """A prompt and what is to be learned of it: one response, or a chosen and a rejected one."""

    where: str
    data_source: str
    prompt: np.ndarray  # [prompt length] int32
    responses: tuple[Response, ...]

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, prompt and response."""
        return [len(self.prompt) + len(response.ids) for response in self.responses]

    def unlearned(self) -> SupervisedRow:
        """The same sequences, of which nothing counts: to fill up what must be shared evenly."""
        return replace(self, responses=tuple(_unlearned(response.ids) for response in self.responses))


@dataclass(frozen=True)
class SupervisedDataset:
    """All rows that are used, in the order of the files."""

    rows: Sequence[SupervisedRow]
    dropped_too_long: int = 0  # how many were left out as longer than `seq_length`
    truncated: int = 0  # how many were shortened to it

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> SupervisedRow:
        return self.rows[index]

    @property
    def row_sources(self) -> list[str]:
        """Of each row, where it comes from."""
        return [row.data_source for row in self.rows]


def load_supervised(
    actor: MegatronConfig, config: Config, tokenizer: PreTrainedTokenizerBase, key: str = "data_path"
) -> SupervisedDataset:
    """Read, template and tokenise the data set; rows of more than `seq_length` tokens as `truncation` says.

    `left` takes away the beginning of the prompt, `right` the end of responses. What is read is said by `actor`,
    which columns by `config`, too; messages call it `key`.

    Raises:
        DataError: a file, row, key or value that cannot be used (names file and line), or nothing is left.
        ConfigError: the user's data set cannot be loaded.
    """
    if actor.apply_chat_template and not (actor.chat_template or tokenizer.chat_template):
        raise DataError(f"apply_chat_template = True, but tokenizer {tokenizer.name_or_path!r} has no chat template")
    rows, dropped, truncated, read = list[SupervisedRow](), 0, 0, 0
    for row in encoded(_Encoder(actor, config, tokenizer), records(actor, tokenizer, key), actor.num_workers):
        read += 1
        if row.length > actor.seq_length:
            shortened = _shortened(row, actor)
            if shortened is None:
                dropped += 1
                continue
            row, truncated = shortened, truncated + 1
        rows.append(row)
        if len(rows) == actor.train_max_samples:
            break
    if not read:
        raise DataError(f"{key} = {actor.data_path!r}: the data set is empty")
    if not rows:
        message = f"all {read} rows are longer than seq_length = {actor.seq_length} tokens"
        raise DataError(f"{key} = {actor.data_path!r}: {message}")
    return SupervisedDataset(rows, dropped, truncated)


def _shortened(row: SupervisedRow, actor: MegatronConfig) -> SupervisedRow | None:
    """The row with `seq_length` tokens at most; None if it is to be left out."""
    if actor.truncation == "drop":
        return None
    message = f"{row.where}: the row has {row.length} tokens, seq_length = {actor.seq_length}"
    if actor.truncation == "error":
        raise DataError(f"{message}; see truncation for what else can be done")
    if actor.truncation == "left":
        excess = row.length - actor.seq_length
        if excess >= len(row.prompt):
            raise DataError(f"{message}: its response alone leaves no room for a token of the prompt")
        return replace(row, prompt=row.prompt[excess:])
    room = actor.seq_length - len(row.prompt)
    responses = tuple(response.first(max(room, 0)) for response in row.responses)
    if not all(response.learned.any() for response in responses):
        raise DataError(f"{message}: its prompt alone leaves no room for a token to learn")
    return replace(row, responses=responses)


class _Encoder:
    """From rows as they are in files to tokens; it and its results travel between processes."""

    def __init__(self, actor: MegatronConfig, config: Config, tokenizer: PreTrainedTokenizerBase):
        self.actor, self.tokenizer, self.is_dpo = actor, tokenizer, actor.stage == "dpo"
        self.messages_key, self.dpo = config.sft_config.messages_key, config.dpo_config
        self.template = read_template(actor.chat_template)

    def __call__(self, chunk: Sequence[tuple[Record, str]]) -> list[SupervisedRow]:
        return [self._row(record, source) for record, source in chunk]

    def _row(self, record: Record, file_source: str) -> SupervisedRow:
        source = str(record.get(self.actor.data_source_key) or file_source)
        if self.messages_key is not None:
            messages = _messages(record, self.messages_key, "messages_key")
            prompt, response = self._conversation(messages, f"{record.where}: messages_key = {self.messages_key!r}")
            return SupervisedRow(record.where, source, prompt, (response,))
        keys = {"answer_key": self.actor.answer_key}
        if self.is_dpo:
            keys = {"chosen_key": self.dpo.chosen_key, "rejected_key": self.dpo.rejected_key}
        answers = [_text(record, key, setting) for setting, key in keys.items()]
        prompt, responses = self._answered(record, answers)
        return SupervisedRow(record.where, source, prompt, tuple(responses))

    def _answered(self, record: Record, answers: Sequence[str]) -> tuple[np.ndarray, list[Response]]:
        """A prompt, text or messages, and responses to it."""
        key = self.actor.prompt_key
        prompt = record.require(key, "prompt_key")
        where = f"{record.where}: prompt_key = {key!r}"
        if self.actor.apply_chat_template:
            messages = (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else _messages(record, key, "prompt_key")
            )
            of_answers = [self._conversation([*messages, _assistant(answer)], where, last=True) for answer in answers]
            return of_answers[0][0], [response for _, response in of_answers]
        if not isinstance(prompt, str):
            raise DataError(f"{where}: must be text, or a list of messages with apply_chat_template: true")
        ids = self.tokenizer(prompt)["input_ids"]  # with the special tokens that begin a text
        if not ids:
            raise DataError(f"{where}: the prompt {prompt!r} has no tokens")
        return np.array(ids, np.int32), [self._learned(answer) for answer in answers]

    def _conversation(self, messages: Messages, where: str, last: bool = False) -> tuple[np.ndarray, Response]:
        """What comes before the first turn that is learned, and all from there on; with `last` only that is learned.

        The text of a turn is what the template adds to the conversation before it.
        """
        first = next((number for number, message in enumerate(messages) if message["role"] == "assistant"), 0)
        if not first:
            raise DataError(f"{where}: needs a turn of the assistant, and one of somebody else before it")
        messages = with_system_prompt(messages, self.actor.system_prompt)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        done, prompt, parts = "", np.empty(0, np.int32), list[Response]()
        for turn in turns[-1:] if last else turns:
            before = self._added(done, messages[:turn], True, where)
            if parts:
                parts.append(_unlearned(self._ids(before)))
            else:
                prompt = self._ids(before)
            answer = self._added(done + before, messages[: turn + 1], False, where)
            parts.append(self._learned(answer, ends=turn == turns[-1]))
            done += before + answer
        ids, learned = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "learned"))
        return prompt, Response(ids, learned)

    def _added(self, done: str, messages: Messages, generation: bool, where: str) -> str:
        """What the template adds to `done` for the conversation up to the last of `messages`."""
        settings = {"add_generation_prompt": generation, **self.actor.chat_template_kwargs}
        text = render(self.tokenizer, messages, self.template, f"{where}: the chat template refuses it", **settings)
        if not text.startswith(done):
            message = "the chat template writes earlier turns otherwise once there is a later one"
            raise DataError(f"{where}: {message}; learn one turn a row, with prompt_key and answer_key")
        return text[len(done) :]

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def _learned(self, text: str, ends: bool = True) -> Response:
        """All tokens up to the end-of-sequence token, which is put there if the sequence `ends` without one.

        What a template writes after it, such as a line feed, is part of the sequence and not learned. A template may
        end turns with another token (that of Qwen2.5's base models does): between turns nothing is put that it lacks.
        """
        ids, end = self._ids(text), self.tokenizer.eos_token_id
        if ends and end not in ids:
            ids = np.append(ids, np.int32(end))
        found = np.flatnonzero(ids == end)
        return Response(ids, np.arange(len(ids)) <= (found[-1] if len(found) else len(ids)))


def _unlearned(ids: np.ndarray) -> Response:
    return Response(ids, np.zeros(len(ids), bool))


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _text(record: Record, key: str, setting: str) -> str:
    value = record.require(key, setting)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{record.where}: {setting} = {key!r}: must be text or a number, is {value!r:.80}")
    return str(value)


def _messages(record: Record, key: str, setting: str) -> list[dict[str, str]]:
    value: Any = record.require(key, setting)
    if not isinstance(value, list) or not all(map(is_message, value)):
        message = f"must be a list of {{role, content}} messages, is {value!r:.80}"
        raise DataError(f"{record.where}: {setting} = {key!r}: {message}")
    return value
