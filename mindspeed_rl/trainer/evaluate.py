"""What `cli/evaluate.py` does: responses of a model, or of a file, scored and counted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.table import Table

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.common.files import replacing
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.prompts import PromptSample, read_row
from mindspeed_rl.data.records import Record, find_files, read_records
from mindspeed_rl.metrics.evaluation import flat, metrics_by_source
from mindspeed_rl.rewards.manager import RewardManager
from mindspeed_rl.trainer.launch import start_validation
from mindspeed_rl.workers.evaluation import evaluate_texts, response_row

Rows = list[dict[str, Any]]
Metrics = Mapping[str, Mapping[str, float]]  # source -> name -> value


def evaluate_model(config: Config, config_yaml: str, config_name: str) -> tuple[Metrics, Rows]:
    """Metrics and responses of the weights that a training run of this configuration would start from.

    Raises:
        MindSpeedRLError: as a training run.
    """
    with ExitStack() as stack:
        validation, step = start_validation(config, config_yaml, config_name, stack)
        return validation.evaluate(step)


def evaluate_file(config: Config, responses: str, response_key: str) -> tuple[Metrics, Rows]:
    """Metrics of responses that are in files: a column with a text or a list of texts beside those of data sets.

    No model and no tokenizer is needed: `response_length` is in characters.

    Raises:
        DataError: a file, row or column that cannot be used; names file and line.
        ConfigError: a verifier cannot be loaded.
    """
    samples, texts, prompts = list[PromptSample](), list[str](), list[int]()
    records = ((record, file.stem) for file in find_files(responses, "--responses") for record in read_records(file))
    for number, (record, source) in enumerate(records):
        found = _responses(record, response_key)
        samples += [read_row(record, source, config.actor)] * len(found)
        texts += found
        prompts += [number] * len(found)
    if not texts:
        raise DataError(f"--responses = {responses!r}: there are no rows")
    with RewardManager(config.rl_config) as manager:
        scored = evaluate_texts(manager, samples, texts, prompts)
    rows = [response_row(*each) for each in zip(samples, scored, texts, strict=True)]
    return metrics_by_source(scored, config.rl_config.val_metric), rows


def _responses(record: Record, key: str) -> list[str]:
    found = record.require(key, "--response-key")
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{record.where}: --response-key = {key!r}: must be text or a list of texts, is {found!r:.60}"
        )
    return texts


def print_metrics(metrics: Metrics, console: Console) -> None:
    """A row for each data source, a column for each metric; empty where sources differ in the number of responses."""
    names = list(dict.fromkeys(name for found in metrics.values() for name in found))
    table = Table(title="Evaluation", title_justify="left")
    for column in ("source", *names):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source, found in metrics.items():
        table.add_row(source, *(f"{found[name]:.4g}" if name in found else "" for name in names))
    console.print(table)


def write_results(folder: Path, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
    """`metrics.json` and `responses.parquet`, each there only when it is whole. NaN is null in JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    finite = {name: value if math.isfinite(value) else None for name, value in flat(metrics).items()}
    with replacing(folder / "metrics.json") as unfinished:
        unfinished.write_text(json.dumps(finite, indent=1) + "\n", encoding="utf-8")
    with replacing(folder / "responses.parquet") as unfinished:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), unfinished)
