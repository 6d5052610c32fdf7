"""Loading a tokenizer and checking that it fits the model."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False, use_fast: bool = True, key: str = "tokenizer_name_or_path"
) -> PreTrainedTokenizerBase:
    """Tokenizer of a Hugging Face folder; nothing is fetched from a network. Messages call what names it `key`.

    Raises:
        DataError: the folder is missing, holds no tokenizer, a corrupt one, or only a fast one where that is not
            wanted (from version 5 on transformers has no others).
    """
    if not Path(path).is_dir():
        raise DataError(f"{key} = {str(path)!r}: no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, use_fast=use_fast, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        summary = str(error).strip().split("\n")[0]
        raise DataError(f"{key} = {str(path)!r}: cannot be loaded: {summary}") from error
    if tokenizer.is_fast and not use_fast:
        message = f"transformers {transformers.__version__} has no other for {str(path)!r}; set it to true"
        raise DataError(f"use_fast_tokenizer = False: {message}")
    return tokenizer


def actor_tokenizer(config: Config, hf_folder: str) -> PreTrainedTokenizerBase:
    """The actor's: of the folder that the configuration names, else that of its model."""
    path, trust = config.actor.tokenizer_name_or_path or hf_folder, config.generate_config.trust_remote_code
    return load_tokenizer(path, trust, config.actor.use_fast_tokenizer)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """See that the model has an embedding for every token, and that a sequence can end.

    Raises:
        DataError: a token id is not below the model's `vocab_size`, or there is no end-of-sequence token.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= model.vocab_size:
        raise DataError(
            f"tokenizer mismatch: tokenizer {tokenizer.name_or_path!r} has token ids up to {largest}, "
            f"the model has vocab_size = {model.vocab_size}"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer mismatch: tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token")
