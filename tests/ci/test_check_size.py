"""The size check reports functions and files that are too long, and only those."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "ci" / "check_size.py"


def check(root: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


def function(lines: int, name: str = "f") -> str:
    return "\n".join([f"def {name}():", *["    pass"] * (lines - 1)]) + "\n"


@pytest.mark.parametrize("folder", ["mindspeed_rl/data", "cli", "tests/data", "benchmarks"])
def test_long_function(tmp_path, folder):
    path = tmp_path / folder / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(function(80) + "class C:\n    async def g(self):\n" + "        pass\n" * 80)
    assert check(tmp_path) == (
        1,
        f"{folder}/a.py:82: g has 81 lines, at most 80 are allowed\nsize: 1 files, 1 violations\n",
    )


def test_long_file(tmp_path):
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "fits.py").write_text("x = 1\n" * 500)
    (tmp_path / "cli" / "long.py").write_text("x = 1\n" * 501)
    assert check(tmp_path) == (
        1,
        "cli/long.py:501: 501 lines, at most 500 are allowed\nsize: 2 files, 1 violations\n",
    )


def test_this_repository_keeps_the_limits():
    code, output = check(REPOSITORY)
    assert code == 0, output
