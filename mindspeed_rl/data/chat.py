"""Conversations as text: what chat templates make of messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from mindspeed_rl.common.errors import DataError

Messages = Sequence[dict[str, str]]  # each with role and content


def is_message(value: Any) -> bool:
    """Whether a value of a data set is a message."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def with_system_prompt(messages: Messages, system_prompt: str | None) -> Messages:
    """With this system message in place of any other; None: as they are."""
    if system_prompt is None:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system_prompt}, *others]


def read_template(path: str | None, key: str = "chat_template") -> str | None:
    """The chat template in a file, which messages call `key`; None: the tokenizer's own is used.

    Raises:
        DataError: the file cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key} = {path!r}: cannot be read: {error}") from error


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, template: str | None, refusal: str, **settings: Any
) -> str:
    """The text of a conversation.

    Args:
        tokenizer: whose template it is if `template` is None.
        messages: the conversation.
        template: in place of the tokenizer's.
        refusal: what to say if the template refuses them: templates do with what they do not know.
        settings: what the template gets besides.

    Raises:
        DataError: it refuses them.
    """
    try:
        text = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **settings)
    except TemplateError as error:
        raise DataError(f"{refusal}: {error}") from error
    assert isinstance(text, str)
    return text
