"""Loggers write what they were given where it can be read back."""

import io
import json
import math
import os
import pty
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.metrics.loggers import (
    ConsoleLogger,
    JsonlLogger,
    MLflowLogger,
    SwanLabLogger,
    TensorBoardLogger,
    WandbLogger,
    make_loggers,
)

METRICS = {"reward/mean": 0.5, "actor/pg_loss": -0.25, "timing/all": 1.5, "throughput/total": 1234.0}
SAMPLES = [{"prompt": "1+[b]=", "response": "2 [/x] ü", "reward": 1.0}]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_console_prints_plain_lines_where_there_is_no_terminal():
    file = io.StringIO()
    logger = ConsoleLogger(10, file)
    logger.log(3, METRICS)
    logger.log_samples(3, SAMPLES)
    logger.log_samples(3, SAMPLES, "val_samples")
    logger.close()
    assert file.getvalue() == (
        "step 3/10  reward 0.500  s/step 1.50  tok/s/dev 1234  pg_loss -0.2500\n"
        "step 3 sample 0  prompt: '1+[b]='  response: '2 [/x] ü'  reward: 1.0\n"
        "step 3 val_sample 0  prompt: '1+[b]='  response: '2 [/x] ü'  reward: 1.0\n"
    )


def test_console_prints_rows_and_a_bar_on_a_terminal():
    file = Terminal()
    logger = ConsoleLogger(2, file)
    for step in (1, 2):
        logger.log(step, METRICS)
    logger.log_samples(2, SAMPLES)
    logger.close()
    text = file.getvalue()
    assert text.count("pg_loss") == 1  # one heading for both rows
    assert text.count("-0.2500") == 2
    assert "2/2" in text
    assert "1+[b]=" in text


def test_console_shows_the_columns_that_fit(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    logger = ConsoleLogger(1, file)
    logger.log(1, METRICS)
    logger.close()
    assert "1234" in file.getvalue()
    assert "pg_loss" not in file.getvalue()


def test_console_on_a_real_pseudo_terminal(tmp_path):
    code = (
        "from mindspeed_rl.metrics.loggers import ConsoleLogger\n"
        "logger = ConsoleLogger(1); logger.log(1, {'reward/mean': 0.125}); logger.close()\n"
    )
    master, slave = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", code], stdout=slave, check=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    assert b"0.125" in os.read(master, 65536)


def test_jsonl_is_on_disk_after_each_step_and_appends(tmp_path):
    logger = JsonlLogger(tmp_path / "run")
    logger.log(1, {**METRICS, "bad": math.nan, "worse": math.inf})
    path = tmp_path / "run" / "metrics.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, **METRICS, "bad": None, "worse": None}
    ]
    logger.log_samples(1, SAMPLES)
    logger.log_samples(2, SAMPLES, "val_samples")
    logger.close()
    resumed = JsonlLogger(tmp_path / "run")
    resumed.log(2, METRICS)
    resumed.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8"))
    assert sample == {"step": 1, **SAMPLES[0]}
    of_validation = json.loads((tmp_path / "run" / "val_samples.jsonl").read_text(encoding="utf-8"))
    assert of_validation == {"step": 2, **SAMPLES[0]}


def test_tensorboard_reads_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    for step in (1, 2):
        logger.log(step, {"reward/mean": step / 4, "timing/all": 2.0})
    logger.log_samples(2, SAMPLES)
    logger.log_samples(2, SAMPLES, "val_samples")
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("grpo/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert {"samples/0/text_summary", "val_samples/0/text_summary"} <= set(events.Tags()["tensors"])


@pytest.mark.parametrize(
    ("package", "logger"), [("wandb", WandbLogger), ("swanlab", SwanLabLogger), ("mlflow", MLflowLogger)]
)
def test_missing_tracker_names_key_and_extra(tmp_path, package, logger):
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError) as caught:
        logger(RLConfig(), tmp_path)
    assert f"rl_config.use_{package} = True: the package {package} is not installed" in str(caught.value)
    assert f"mindspeed_rl[{package}]" in str(caught.value)
    with pytest.raises(ConfigError):
        make_loggers(RLConfig(**{f"use_{package}": True}), tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()  # refused before anything was written


# a stand-in on sys.path for the package that is not installed: records init and finish
FAKE_WANDB = """
class Run:
    def log(self, values, step): print("log", step, values)
    def finish(self): print("finish")
def init(**settings):
    print("init", settings["project"], settings["name"])
    return Run()
"""


def test_tensorboard_is_off_where_wandb_is_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    cfg = RLConfig(use_tensorboard=True, use_wandb=True, wandb_project="p", wandb_exp_name="e")
    loggers = make_loggers(cfg, tmp_path / "run", 3)
    assert [type(logger) for logger in loggers] == [JsonlLogger, WandbLogger, ConsoleLogger]
    loggers[1].log(1, {"throughput/total": 2.0})
    for logger in loggers:
        logger.close()
    monkeypatch.delitem(sys.modules, "wandb")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["init p e", "log 1 {'throughput/total': 2.0, 'e2e_tps': 2.0}", "finish"]


# likewise; names are checked as MLflow documents them
FAKE_MLFLOW = """
import re
def set_experiment(name): pass
def start_run(run_name): pass
def log_dict(values, file): pass
def log_metrics(values, step):
    assert all(re.fullmatch(r"[\\w\\-. /]+", name) for name in values), values
    print(step, values)
def end_run(): pass
"""


def test_names_that_mlflow_refuses_are_changed_for_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "mlflow.py").write_text(FAKE_MLFLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    logger = MLflowLogger(RLConfig(use_mlflow=True), tmp_path)
    logger.log(3, {"val/openai/gsm8k/pass@4": 0.5, "val/a:b/reward/mean": 1.0})
    logger.close()
    monkeypatch.delitem(sys.modules, "mlflow")
    assert capsys.readouterr().out.strip() == "3 {'val/openai/gsm8k/pass_4': 0.5, 'val/a_b/reward/mean': 1.0}"


def test_default_loggers(tmp_path):
    loggers = make_loggers(RLConfig(), tmp_path, 3)
    assert [type(logger) for logger in loggers] == [JsonlLogger, TensorBoardLogger, ConsoleLogger]
    for logger in loggers:
        logger.close()
    loggers = make_loggers(RLConfig(use_tensorboard=False), str(tmp_path), 3)
    assert [type(logger) for logger in loggers] == [JsonlLogger, ConsoleLogger]
    for logger in loggers:
        logger.close()
    assert Path(tmp_path, "metrics.jsonl").exists()
