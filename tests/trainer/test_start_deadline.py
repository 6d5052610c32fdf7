"""A start that takes too long ends the run, and says what was waited for."""

from pathlib import Path

from tests.support.forked import run_forked
from tests.support.runs import command, make_inputs


def test_workers_that_do_not_come_up_in_time(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    _, _, *arguments = command(tmp_path, tmp_path, "rl_config.start_timeout_minutes=0.0001")
    said = tmp_path / "said.txt"
    assert run_forked("train_grpo", arguments, said) == 3
    assert "not finished after 0.0001 minutes" in said.read_text()
    assert "start" in said.read_text()
