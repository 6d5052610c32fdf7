"""Output files that either exist in full or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, to write to: it becomes `path` at the end, and is deleted if the block raises.

    Raises:
        OSError: `path` is a folder, or its folder cannot be made or written.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
