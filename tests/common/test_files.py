from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.common.files import replacing


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows"
    with replacing(path) as unfinished:
        unfinished.write_text("all")
        assert not path.exists()
    assert path.read_text() == "all"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as unfinished:
            unfinished.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_refused_before_the_block_runs(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"), replacing(tmp_path):
        pytest.fail("ran")
