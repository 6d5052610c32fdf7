"""Rows of jsonl, json and parquet files, each with the place it came from, so that errors can name it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from mindspeed_rl.common.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Record:
    """One row and where it is: `file:line` of a jsonl file, `file:row` (from 1) of the others."""

    row: Any
    where: str

    def get(self, key: str) -> Any:
        """Value of a column, or of a field within it (`reward_model.ground_truth`); None where it is absent."""
        value: Any = self.row
        if key in value:
            return value[key]
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def require(self, key: str, setting: str) -> Any:
        """Value of a column that must be there.

        Raises:
            DataError: it is absent, null or empty; names the place, the setting and the columns there are.
        """
        value = self.get(key)
        if value is not None and value not in ("", []):
            return value
        present = sorted(self.row)
        if key in present or "." in key:
            raise DataError(f"{self.where}: {setting} = {key!r}: is missing or empty in this row")
        close = difflib.get_close_matches(key, present, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(f"{self.where}: {setting} = {key!r}: no such column, there are {present}{hint}")


def find_files(data_path: str | Sequence[str], key: str = "data_path") -> list[Path]:
    """The files that `data_path` names: each entry a file, or a prefix that `cli/preprocess_data.py` wrote to.

    key: what names them, for messages.

    Raises:
        DataError: an entry is neither, or is of an unknown type; or there is no entry.
    """
    files = []
    for entry in [data_path] if isinstance(data_path, str) else data_path:
        candidates = [Path(entry), *(Path(entry + suffix) for suffix in SUFFIXES)]
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            raise DataError(f"{key} = {entry!r}: no such file, and no {entry}.parquet or {entry}.jsonl either")
        if found.suffix not in SUFFIXES:
            raise DataError(f"{key} = {entry!r}: file type {found.suffix!r} is not one of {', '.join(SUFFIXES)}")
        files.append(found)
    if not files:
        raise DataError(f"{key} = {data_path!r}: names no file")
    return files


def read_records(file: Path, dictionaries: bool = True) -> Iterator[Record]:
    """Rows of one file in order; empty lines of a jsonl file are skipped.

    Args:
        dictionaries: rows must be objects with named columns.

    Raises:
        DataError: not UTF-8, not valid JSON, not an object, or a corrupt parquet file; names file and line.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    for record in readers[file.suffix](file):
        if dictionaries and not isinstance(record.row, dict):
            raise DataError(f"{record.where}: must be an object with columns, is {record.row!r:.60}")
        yield record


def _parse(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 text: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: is not valid JSON: {error}") from error


def _read_jsonl(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.strip():
                where = f"{file}:{number}"
                yield Record(_parse(raw, where), where)


def _read_json(file: Path) -> Iterator[Record]:
    rows = _parse(file.read_bytes(), str(file))
    if not isinstance(rows, list):
        raise DataError(f"{file}: must hold a list of rows, holds {rows!r:.60}")
    for number, row in enumerate(rows, start=1):
        yield Record(row, f"{file}:{number}")


def _read_parquet(file: Path) -> Iterator[Record]:
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield Record(row, f"{file}:{number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as parquet after row {number}: {error}") from error
