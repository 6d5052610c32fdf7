"""Show how a run went, from its metrics.jsonl: `python -m mindspeed_rl.metrics.curve RUN_DIR`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.metrics.loggers import METRICS_FILE

BLOCKS = "▁▂▃▄▅▆▇█"
TABLE_COLUMNS = (
    ("reward", "reward/mean"),
    ("length", "response_length/mean"),
    ("entropy", "actor/entropy"),
    ("kl", "actor/kl"),
    ("s/step", "timing/all"),
)
TABLE_ROWS = 20
PLOT_WIDTH, PLOT_HEIGHT = 72, 10


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order of their step; the last of a step that occurs twice (a resumed run).

    A last line without its end, left by a run that was killed, is ignored.

    Raises:
        DataError: no such file, no steps in it, or a line that is not a JSON object with a step; names the line.
    """
    path = run_dir / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; is this a run folder?") from None
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            by_step[int(record["step"])] = record
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a JSON object with a step: {error}") from error
    if not by_step:
        raise DataError(f"{path}: no steps in it")
    return [by_step[step] for step in sorted(by_step)]


def series(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    """One metric over the steps; NaN where a step lacks it.

    Raises:
        DataError: no step has it; names those there are.
    """
    values = [math.nan if record.get(name) is None else float(record[name]) for record in records]
    if all(math.isnan(value) for value in values):
        raise DataError(f"metric {name!r} is in no step; there are: {', '.join(sorted(records[-1]))}")
    return values


def sparkline(values: Sequence[float], width: int = PLOT_WIDTH) -> str:
    """One character a value from low to high; more than `width` values are averaged down. NaN is a blank."""
    values = _resample(values, width)
    finite = [value for value in values if not math.isnan(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low or 1.0
    top = len(BLOCKS) - 1
    return "".join(" " if math.isnan(v) else BLOCKS[round((v - low) / span * top)] for v in values)


def plot(values: Sequence[float], width: int = PLOT_WIDTH, height: int = PLOT_HEIGHT) -> str:
    """A bar chart in text with the values at the axis; more than `width` values are averaged down."""
    values = _resample(values, width)
    finite = [value for value in values if not math.isnan(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low or 1.0
    steps = len(BLOCKS)
    # in eighths of a row; the lowest value is still visible
    levels = [0 if math.isnan(v) else 1 + round((v - low) / span * (height * steps - 1)) for v in values]
    rows = []
    for row in reversed(range(height)):
        filled = [min(max(level - row * steps, 0), steps) for level in levels]
        label = f"{low + span * (row + 1) / height:8.3f}" if row else f"{low:8.3f}"
        rows.append(f"{label} │" + "".join(BLOCKS[n - 1] if n else " " for n in filled))
    return "\n".join(rows)


def table(records: Sequence[dict[str, Any]], rows: int = TABLE_ROWS) -> str:
    """Text table of at most `rows` evenly spaced steps, the first and the last among them."""
    last = len(records) - 1
    picks = sorted({round(i * last / max(min(rows, len(records)) - 1, 1)) for i in range(min(rows, len(records)))})
    columns = [(heading, name) for heading, name in TABLE_COLUMNS if any(name in record for record in records)]
    lines = ["  step" + "".join(f"{heading:>10}" for heading, _ in columns)]
    for pick in picks:
        cells = (records[pick].get(name) for _, name in columns)
        text = "".join(f"{'-' if cell is None else format(cell, '.4f'):>10}" for cell in cells)
        lines.append(f"{records[pick]['step']:6d}{text}")
    return "\n".join(lines)


def write_png(records: Sequence[dict[str, Any]], name: str, path: Path) -> bool:
    """Draw one metric over the steps into `path`. False, and no file, where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=name, title=path.parent.name)
    axes.plot([record["step"] for record in records], series(records, name), marker=".")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Print table and curve of a run and write the PNG; the exit code is 1 where the run cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run folder")
    parser.add_argument("--metric", default="reward/mean", help="metric to draw (default: %(default)s)")
    parser.add_argument("--png", type=Path, help="picture to write (default: RUN_DIR/<metric>.png)")
    options = parser.parse_args(arguments)
    try:
        records = read_metrics(options.run_dir)
        values = series(records, options.metric)
    except DataError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    first, last = (next(v for v in order if not math.isnan(v)) for order in (values, reversed(values)))
    print(table(records))
    print(f"\n{options.metric} over {len(records)} steps: {first:.3f} → {last:.3f}   {sparkline(values, 40)}\n")
    print(plot(values))
    png = options.png or options.run_dir.resolve() / f"{options.metric.replace('/', '_')}.png"
    if write_png(records, options.metric, png):
        print(f"\nwritten: {png}")
    else:
        print("\nno PNG: matplotlib is not installed", file=sys.stderr)
    return 0


def _resample(values: Sequence[float], width: int) -> list[float]:
    """Average runs of neighbours so that at most `width` values are left; NaN are left out of the averages."""
    if len(values) <= width:
        return list(values)
    result = []
    for i in range(width):
        part = [v for v in values[i * len(values) // width : (i + 1) * len(values) // width] if not math.isnan(v)]
        result.append(sum(part) / len(part) if part else math.nan)
    return result


if __name__ == "__main__":
    sys.exit(main())
