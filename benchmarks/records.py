"""What every benchmark here shares: one table on the console, one JSON file of records."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's own folder is searched by Python, the repository is not


@dataclass(frozen=True)
class Record:
    """One figure. `limit` is what physics or arithmetic allows, `peer` what another system does, both in `unit`."""

    metric: str
    value: float
    unit: str
    limit: float | None = None
    peer: float | None = None
    note: str = ""


def cpu_name() -> str:
    """Model and number of usable cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def publish(
    benchmark: str, records: Sequence[Record], hardware: str, write: bool = True, keep_others: bool = False
) -> None:
    """Print `records` and write `benchmarks/results/<benchmark>.json`, with date, command and commit in each.

    `write=False`, for a run too short to be kept, only prints. With `keep_others` other metrics in the file stay.
    """
    table = Table(title=f"{benchmark} on {hardware}")
    for column in ("metric", "value", "unit", "limit", "peer", "note"):
        table.add_column(column, overflow="fold")
    for record in records:
        cells = [record.value, record.unit, record.limit, record.peer]
        shown = [f"{cell:.4g}" if isinstance(cell, float | int) else cell or "" for cell in cells]
        table.add_row(record.metric, *shown, record.note)
    Console().print(table)
    if not write:
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    common = {
        "hardware": hardware,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
    }
    path = ROOT / "benchmarks" / "results" / f"{benchmark}.json"
    others = json.loads(path.read_text()) if keep_others and path.exists() else []
    known = {record.metric for record in records}
    found = [other for other in others if other["metric"] not in known]
    found += [{**asdict(record), **common} for record in records]
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT)}")


def train(config_name: str, output: Path, *overrides: str) -> list[dict[str, float]]:
    """Metrics of every step of a training run, which writes to `output`."""
    arguments = [f"--config-name={config_name}", f"output_dir={output}", "run_name=run", *overrides]
    command = f"train_{config_name.partition('_')[0]}.py"  # configurations are called after their algorithm
    subprocess.run([sys.executable, ROOT / "cli" / command, *arguments], cwd=ROOT, check=True)
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
