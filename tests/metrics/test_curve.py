"""The run summary: tables, text plots, PNG, and runs that cannot be read."""

import json
import math
import sys

import pytest

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.metrics.curve import main, plot, read_metrics, sparkline, table
from mindspeed_rl.metrics.loggers import JsonlLogger


@pytest.fixture
def run_dir(tmp_path):
    logger = JsonlLogger(tmp_path)
    for step in range(1, 101):
        logger.log(step, {"reward/mean": step / 100, "timing/all": 2.5})
    logger.close()
    return tmp_path


def test_main_prints_table_and_curve_and_writes_a_png(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "     1    0.0100    2.5000" in out
    assert "   100    1.0000    2.5000" in out
    assert "reward/mean over 100 steps: 0.010 → 1.000" in out
    assert (run_dir / "reward_mean.png").read_bytes().startswith(b"\x89PNG")


def test_png_is_optional(run_dir, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(run_dir)]) == 0
    assert "no PNG: matplotlib is not installed" in capsys.readouterr().err


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 1.0]) == "▁ ▁"
    assert sparkline(list(range(100)), width=4) == "▁▃▆█"
    assert sparkline([]) == ""


def test_plot():
    rows = plot([0.0, 1.0, math.nan, 0.5], width=10, height=2).splitlines()
    assert rows == ["   1.000 │ █ ▁", "   0.000 │▁█ █"]


def test_table_has_first_and_last_step_and_marks_gaps():
    records = [{"step": i, "reward/mean": 0.5 if i % 2 else None} for i in range(1, 51)]
    lines = table(records, rows=5).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1", "13", "25", "38", "50"]
    assert lines[-1].split() == ["50", "-"]
    assert len(table(records[:1]).splitlines()) == 2


def test_later_line_of_a_step_counts_and_a_cut_last_line_is_ignored(tmp_path):
    lines = [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 2, "x": 3}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "x'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert read_metrics(tmp_path) == [{"step": 1, "x": 1}, {"step": 2, "x": 3}]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "no such file"),
        ("", "no steps in it"),
        ('{"step": 1}\nnonsense\n', r"metrics.jsonl:2: not a JSON object with a step"),
        ('{"step": 1}\n{"reward": 1}\n', r"metrics.jsonl:2: not a JSON object with a step"),
        ("[1]\n", r"metrics.jsonl:1: not a JSON object with a step"),
    ],
)
def test_unreadable_run(tmp_path, capsys, text, match):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(DataError, match=match):
        read_metrics(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert "metrics.jsonl" in capsys.readouterr().err


def test_unknown_metric_names_those_there_are(run_dir, capsys):
    assert main([str(run_dir), "--metric", "nope"]) == 1
    assert "metric 'nope' is in no step; there are: reward/mean, step, timing/all" in capsys.readouterr().err
