"""Files and folders that either exist in full or not at all, also after a power cut."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_rl.common.errors import CheckpointError

# What a model needs beside its weights: configuration, tokenizer, chat template, code of custom architectures.
HF_FILE_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*.jinja",
    "*.py",
)


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to stable storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file by way of a temporary one beside it; readers see the old content or the new."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(content)
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_file` of a JSON value."""
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Contents of a JSON file.

    Raises:
        CheckpointError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from error


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` at the end, and is deleted if the block raises.

    Raises:
        CheckpointError: `path` exists and is not an empty folder.
    """
    path = path.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists already: choose another folder or delete it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for entry in temporary.iterdir():
            fsync_path(entry)
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_hf_files(source: Path, target: Path) -> None:
    """Copy a Hugging Face folder's configuration and tokenizer files, not its weights.

    Raises:
        CheckpointError: the source has no config.json.
    """
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json: is it a Hugging Face folder?")
    for pattern in HF_FILE_PATTERNS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
                fsync_path(target / path.name)
