from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.common.command_line import run_command
from mindspeed_rl.common.errors import ConfigError, DataError, DockTimeout, Violation, WorkerFailed


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("no rows"), 1),
        (ConfigError([Violation("lr", -1, "must be positive")]), 2),
        (WorkerFailed(3, "update", 7, "out of memory"), 3),
        (DockTimeout("waited for rewards"), 1),
        (OSError(28, "No space left on device", "weights"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_a_message_and_an_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: _raise(error)) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"{str(error) or 'interrupted'}\n"


def test_a_result_is_the_exit_code() -> None:
    assert [run_command(lambda code=code: code) for code in (0, 5)] == [0, 5]


def test_an_unwritable_place_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: tmp_path.write_text("a folder")) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        run_command(lambda: _raise(KeyError("bug")))
