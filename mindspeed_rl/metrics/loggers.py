"""Where a run's metrics go: console, metrics.jsonl, TensorBoard, and the trackers a user has installed."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.metrics.names import with_aliases

METRICS_FILE = "metrics.jsonl"
DEFAULT_PROJECT = "mindspeed_rl"

Sample = Mapping[str, Any]  # prompt, response, label, reward


class MetricLogger(Protocol):
    """A sink for what the trainer reports."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the finalised metrics of one step."""

    def log_samples(self, step: int, samples: Sequence[Sample], name: str = "samples") -> None:
        """Record generated samples, with whatever keys they have; name: tells kinds of the same step apart."""

    def close(self) -> None:
        """Flush and release everything."""


class ConsoleLogger:
    """One table row a step over a progress bar; plain lines where the output is no terminal.

    Args:
        total_steps: length of the progress bar.
        file: where to write; None: standard output.
    """

    # heading, metric, format; the most wanted first, for a narrow terminal shows only those that fit
    COLUMNS = (
        ("reward", "reward/mean", "{:.3f}"),
        ("val", "val/all/reward/mean", "{:.3f}"),
        ("loss", "sft/loss", "{:.4f}"),
        ("loss", "dpo/loss", "{:.4f}"),
        ("margin", "dpo/margin", "{:+.4f}"),
        ("accuracy", "dpo/accuracy", "{:.3f}"),
        ("val_loss", "val/all/loss", "{:.4f}"),
        ("length", "response_length/mean", "{:.1f}"),
        ("s/step", "timing/all", "{:.2f}"),
        ("tok/s/dev", "throughput/total", "{:.0f}"),
        ("kl", "actor/kl", "{:.4f}"),
        ("entropy", "actor/entropy", "{:.3f}"),
        ("grad_norm", "actor/grad_norm", "{:.3f}"),
        ("pg_loss", "actor/pg_loss", "{:+.4f}"),
        ("clipped", "actor/pg_clipfrac", "{:.3f}"),
        ("lp_diff", "rollout/logprob_diff_mean", "{:.1e}"),
    )
    WIDTH = 9
    HEADER_EVERY = 20

    def __init__(self, total_steps: int, file: TextIO | None = None):
        self.total_steps = total_steps
        self.console = Console(file=file or sys.stdout, highlight=False)
        self.rows = 0
        self.progress: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task("train", total=total_steps)
            self.progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        cells = [
            (heading, template.format(metrics[name])) for heading, name, template in self.COLUMNS if name in metrics
        ]
        if self.progress is None:
            text = "  ".join(f"{heading} {value}" for heading, value in cells)
            print(f"step {step}/{self.total_steps}  {text}", file=self.console.file, flush=True)
            return
        cells = cells[: self.console.width // (self.WIDTH + 1) - 1]
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=self.rows % self.HEADER_EVERY == 0)
        for heading in ("step", *(heading for heading, _ in cells)):
            table.add_column(heading, justify="right", min_width=self.WIDTH, no_wrap=True)
        table.add_row(str(step), *(value for _, value in cells))
        self.console.print(table)
        self.rows += 1
        self.progress.update(self.task, completed=step)

    def log_samples(self, step: int, samples: Sequence[Sample], name: str = "samples") -> None:
        for number, sample in enumerate(samples):
            if self.progress is None:
                fields = "  ".join(f"{key}: {value!r}" for key, value in sample.items())
                print(f"step {step} {name.removesuffix('s')} {number}  {fields}", file=self.console.file, flush=True)
            else:
                text = "\n".join(f"[bold]{key}[/bold] {escape(str(value))}" for key, value in sample.items())
                self.console.print(f"[dim]{name.removesuffix('s')} {number} of step {step}[/dim]\n{text}")

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


class JsonlLogger:
    """`metrics.jsonl`, `samples.jsonl` and `val_samples.jsonl` in the run folder: an object a line, written at once.

    A resumed run appends, so that a step may occur twice: the later line is the one that counts. Numbers that
    JSON does not know (NaN, infinities) are written as null.
    """

    def __init__(self, run_dir: Path):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics = (run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self.folder, self.samples = run_dir, dict[str, TextIO]()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._write(self.metrics, {"step": step, **finite})

    def log_samples(self, step: int, samples: Sequence[Sample], name: str = "samples") -> None:
        if name not in self.samples:
            self.samples[name] = (self.folder / f"{name}.jsonl").open("a", encoding="utf-8")
        for sample in samples:
            self._write(self.samples[name], {"step": step, **sample})

    def close(self) -> None:
        for file in (self.metrics, *self.samples.values()):
            file.close()

    @staticmethod
    def _write(file: TextIO, record: Mapping[str, Any]) -> None:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()


class TensorBoardLogger:
    """Event files in `run_dir/tensorboard`."""

    def __init__(self, run_dir: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in with_aliases(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_samples(self, step: int, samples: Sequence[Sample], name: str = "samples") -> None:
        for number, sample in enumerate(samples):
            text = "\n\n".join(f"**{key}**\n\n    {value}" for key, value in sample.items())
            self.writer.add_text(f"{name}/{number}", text, step)

    def close(self) -> None:
        self.writer.close()


class WandbLogger:
    """Weights & Biases."""

    def __init__(self, cfg: RLConfig, run_dir: Path):
        self.wandb = _require("wandb", "use_wandb")
        self.run = self.wandb.init(
            project=cfg.wandb_project or DEFAULT_PROJECT,
            name=cfg.wandb_exp_name or run_dir.name,
            dir=cfg.wandb_save_dir or str(run_dir),
            config=cfg.model_dump(),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(with_aliases(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample], name: str = "samples") -> None:
        keys = sorted({key for sample in samples for key in sample})
        rows = [[str(sample.get(key, "")) for key in keys] for sample in samples]
        self.run.log({name: self.wandb.Table(columns=keys, data=rows)}, step=step)

    def close(self) -> None:
        self.run.finish()


class SwanLabLogger:
    """SwanLab."""

    def __init__(self, cfg: RLConfig, run_dir: Path):
        self.swanlab = _require("swanlab", "use_swanlab")
        self.swanlab.init(
            project=DEFAULT_PROJECT,
            experiment_name=run_dir.name,
            config=cfg.model_dump(),
            logdir=str(run_dir / "swanlab"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.swanlab.log(with_aliases(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample], name: str = "samples") -> None:
        texts = [self.swanlab.Text(_as_text(sample)) for sample in samples]
        self.swanlab.log({name: texts}, step=step)

    def close(self) -> None:
        self.swanlab.finish()


class MLflowLogger:
    """MLflow; the server is the one that MLFLOW_TRACKING_URI names, else MLflow's default."""

    def __init__(self, cfg: RLConfig, run_dir: Path):
        self.mlflow = _require("mlflow", "use_mlflow")
        self.mlflow.set_experiment(DEFAULT_PROJECT)
        self.mlflow.start_run(run_name=run_dir.name)
        self.mlflow.log_dict(cfg.model_dump(), "rl_config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # names take letters, digits and _-. /, not the @ of pass@k or what a data source may be called
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in with_aliases(metrics).items()}
        self.mlflow.log_metrics(named, step=step)

    def log_samples(self, step: int, samples: Sequence[Sample], name: str = "samples") -> None:
        self.mlflow.log_text("\n\n".join(map(_as_text, samples)), f"{name}/{step}.txt")

    def close(self) -> None:
        self.mlflow.end_run()


def make_loggers(cfg: RLConfig, run_dir: str | Path, total_steps: int) -> list[MetricLogger]:
    """The loggers that the configuration asks for; console and JSONL always.

    TensorBoard is off where `use_tensorboard` and `use_wandb` are both true, as in MindSpeed RL.

    Args:
        cfg: the run's `rl_config`.
        run_dir: the run folder, made if missing.
        total_steps: iterations of the run, for the progress bar.

    Raises:
        ConfigError: a tracker is asked for whose package is not installed; names the extra that has it.
    """
    folder = Path(run_dir)
    wanted: list[MetricLogger] = []
    # trackers first: they may be refused, and then nothing has been written yet
    if cfg.use_wandb:
        wanted.append(WandbLogger(cfg, folder))
    if cfg.use_swanlab:
        wanted.append(SwanLabLogger(cfg, folder))
    if cfg.use_mlflow:
        wanted.append(MLflowLogger(cfg, folder))
    if cfg.use_tensorboard and not cfg.use_wandb:
        wanted.append(TensorBoardLogger(folder))
    return [JsonlLogger(folder), *wanted, ConsoleLogger(total_steps)]


def _as_text(sample: Sample) -> str:
    return "\n".join(f"{key}: {value}" for key, value in sample.items())


def _require(package: str, key: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        suggestion = f"pip install 'mindspeed_rl[{package}]', or set it to false"
        violation = Violation(f"rl_config.{key}", True, f"the package {package} is not installed", suggestion)
        raise ConfigError([violation]) from error
