"""Tensors in rectangles: any rectangles read what any others wrote, and torch reads them as its own."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mindspeed_rl.checkpoint import tensors
from mindspeed_rl.checkpoint.tensors import Piece, StoredTensors, complete, file_name, pieces_of, write_pieces
from mindspeed_rl.common.errors import CheckpointError

WHOLE = torch.arange(60.0).view(6, 10)
VECTOR = torch.arange(7, dtype=torch.bfloat16)


def piece(row: int, column: int, rows: int, columns: int, data: torch.Tensor | None = None) -> Piece:
    part = WHOLE[row : row + rows, column : column + columns] if data is None else data
    return Piece("a", (6, 10), (row, column), part)


def write(folder: Path, *of_ranks: list[Piece]) -> StoredTensors:
    complete(folder, [write_pieces(folder / file_name(rank), pieces) for rank, pieces in enumerate(of_ranks)])
    return StoredTensors(folder)


@pytest.fixture
def stored(tmp_path: Path) -> StoredTensors:
    first = [piece(0, 0, 1, 3), piece(0, 3, 1, 7), piece(1, 0, 3, 4)]
    return write(
        tmp_path,
        first,
        [piece(1, 4, 3, 6), Piece("b", (7,), (0,), VECTOR[:3])],
        [piece(4, 0, 2, 10), Piece("b", (7,), (3,), VECTOR[3:])],
    )


def test_whole_tensors(stored: StoredTensors) -> None:
    assert torch.equal(stored.tensor("a"), WHOLE)
    assert torch.equal(stored.tensor("b"), VECTOR)
    assert stored.tensor("b").dtype == torch.bfloat16
    assert stored.names() == ["a", "b"]
    assert stored.names("b") == ["b"]


def test_other_rectangles_in_place_and_in_another_dtype(stored: StoredTensors) -> None:
    memory = torch.full((6, 10), -1.0)
    half = torch.empty(2, 5, dtype=torch.bfloat16)
    # twice the same rectangle into different memory, one of it a part of a larger tensor
    stored.read([piece(1, 2, 4, 5, memory[1:5, 2:7]), piece(3, 2, 2, 5, half), piece(3, 2, 2, 5, memory[:2, 5:])])
    assert torch.equal(memory[2:5, 2:7], WHOLE[2:5, 2:7])
    assert torch.equal(memory[:2, 5:], WHOLE[3:5, 2:7])
    assert torch.equal(half, WHOLE[3:5, 2:7].bfloat16())
    assert (memory[5] == -1).all()


def test_torch_reads_it(stored: StoredTensors) -> None:
    state = {"a": torch.zeros(6, 10), "b": torch.zeros(7, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=stored.folder, no_dist=True)
    assert torch.equal(state["a"], WHOLE)
    assert torch.equal(state["b"], VECTOR)


def test_large_tensors_are_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "LARGEST", 25)
    found = write(tmp_path, [*pieces_of("a", WHOLE), *pieces_of("b", torch.arange(60.0))])
    assert torch.equal(found.tensor("a"), WHOLE)
    assert torch.equal(found.tensor("b"), torch.arange(60.0))
    assert [len(piece.data) for piece in pieces_of("a", WHOLE)] == [2, 2, 2]
    assert [len(piece.data) for piece in pieces_of("b", torch.arange(60.0))] == [25, 25, 10]


def test_equal_contents_make_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, [piece(0, 0, 6, 10)], [])
    files = [sorted((tmp_path / name).iterdir()) for name in ("one", "two")]
    assert [path.name for path in files[0]] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_memory_around_a_piece_is_not_written(tmp_path: Path) -> None:
    large = torch.zeros(1000, 1000)
    write(tmp_path, [Piece("a", (2, 3), (0, 0), large[5:7, 4:7])])
    assert (tmp_path / file_name(0)).stat().st_size < 10_000


@pytest.mark.parametrize(
    "of_ranks",
    [
        [[piece(0, 0, 3, 10)]],
        [[piece(0, 0, 3, 10)], [piece(3, 0, 3, 9)]],
        [[piece(0, 0, 3, 10)], [piece(0, 0, 3, 10)]],
        [[piece(0, 0, 6, 10)], [piece(3, 0, 3, 10)]],
    ],
    ids=["half", "hole", "twice", "overlap"],
)
def test_what_is_not_written_once_is_refused(tmp_path: Path, of_ranks: list[list[Piece]]) -> None:
    with pytest.raises(CheckpointError, match=r"parts of 1 tensors were not written once: a"):
        write(tmp_path, *of_ranks)
    assert not (tmp_path / ".metadata").exists()


def test_what_does_not_fit_is_named(stored: StoredTensors) -> None:
    with pytest.raises(CheckpointError, match=r"has nothing for c, expected shape \(1,\)"):
        stored.read([Piece("c", (1,), (0,), torch.zeros(1))])
    with pytest.raises(CheckpointError, match=r"has shape \(6, 10\) for a, expected shape \(6, 12\)"):
        stored.read([Piece("a", (6, 12), (0, 0), torch.zeros(6, 12))])
    with pytest.raises(CheckpointError, match="holds no c"):
        stored.tensor("c")


def test_damage_is_named(stored: StoredTensors) -> None:
    path = stored.folder / file_name(1)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        stored.tensor("b")
    (stored.folder / ".metadata").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        StoredTensors(stored.folder)
