"""Tensors that many ranks write and any others read, in the form of `torch.distributed.checkpoint`.

A tensor is stored as rectangles. Every rank writes those it has into a file of its own, without talking to others;
whoever has all of their `Written` completes the folder with `.metadata`, which says where each rectangle is. Readers
ask for other rectangles, and get what these have in common with the stored ones.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from mindspeed_rl.common.errors import CheckpointError

METADATA = ".metadata"
LARGEST = 2**24  # elements that a piece should have at most: who needs a part of it reads the whole of it


@dataclass(frozen=True)
class Piece:
    """A rectangle of a stored tensor, and the memory from which it is written or into which it is read."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the rectangle in it
    data: torch.Tensor  # [*sizes of the rectangle]


def pieces_of(name: str, tensor: torch.Tensor) -> Iterator[Piece]:
    """Blocks of rows that make up a whole tensor."""
    rows = max(1, LARGEST // prod(tensor.shape[1:]))
    for first, block in zip(range(0, len(tensor), rows), tensor.split(rows), strict=True):
        yield Piece(name, tuple(tensor.shape), (first, *(0,) * (tensor.dim() - 1)), block)


@dataclass(frozen=True)
class Written:
    """What one rank has put into its file."""

    items: list[WriteItem]
    results: list[WriteResult]
    record: dict[str, Any]  # of the file, see `HashingFile.record`


class HashingFile:
    """What torch.save writes to: passes bytes on and keeps their number and SHA-256."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        """Flush to stable storage."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def record(self) -> dict[str, Any]:
        """Number of bytes and SHA-256 of what was written."""
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}


def file_name(rank: int) -> str:
    """File of a rank's tensors, named as torch does."""
    return f"__{rank}_0.distcp"


def write_pieces(path: Path, pieces: Iterable[Piece]) -> Written:
    """Write a rank's file; beside the pieces themselves, one of them is in host memory at a time."""
    items, results = [], []
    with path.open("wb") as file:
        hashing = HashingFile(file)
        for piece in pieces:
            start = hashing.size
            torch.save(alone(piece.data), cast(IO[bytes], hashing))
            chunk = _chunk(piece)
            properties = TensorProperties(dtype=piece.data.dtype)
            item = WriteItem(
                MetadataIndex(piece.name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(piece.shape)),
            )
            where = _StorageInfo(path.name, start, hashing.size - start)
            items.append(item)
            results.append(WriteResult(item.index, where.length, where))
        hashing.sync()
    return Written(items, results, hashing.record())


def alone(data: torch.Tensor) -> torch.Tensor:
    """On the host, in storage of its own size: torch.save writes the whole storage under a view."""
    tensor = data.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.data.shape)


class _MetadataWriter(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """None: it would name this folder and this moment, and make equal checkpoints differ."""
        return None


def complete(folder: Path, written: Sequence[Written]) -> None:
    """Write `.metadata` of the files of all ranks.

    Raises:
        CheckpointError: something of a tensor was not written, or twice.
    """
    _, metadata = create_default_global_save_plan([SavePlan(of_rank.items) for of_rank in written])
    stored = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
    counts = Counter(result.index for of_rank in written for result in of_rank.results)
    wrong = {index.fqn for index, count in counts.items() if count > 1}
    wrong |= {
        name
        for name, tensor in stored.items()
        if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.size)
    }
    if wrong:
        raise CheckpointError(f"{folder}: parts of {len(wrong)} tensors were not written once: {_some(wrong)}")
    _MetadataWriter(folder).finish(metadata, [of_rank.results for of_rank in written])


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", …" if len(listed) > 5 else "")


class StoredTensors:
    """The tensors in a complete folder.

    Its `.metadata` is a pickle: only open folders that you trust.

    Raises:
        CheckpointError: `.metadata` cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder, self._reader = folder, FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise CheckpointError(f"{folder / METADATA} cannot be read: {error}") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._stored = cast(dict[str, TensorStorageMetadata], self._metadata.state_dict_metadata)

    def names(self, prefix: str = "") -> list[str]:
        """Names of the tensors that begin with `prefix`."""
        return [name for name in self._stored if name.startswith(prefix)]

    def read(self, pieces: Iterable[Piece]) -> None:
        """Fill the pieces' memory, which may have another dtype than what is stored, or be on a device.

        Raises:
            CheckpointError: a tensor is not there or has another shape, or a file cannot be read.
        """
        planner = _Pieces(self.folder, pieces)
        planner.set_up_planner({}, self._metadata)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor on the host."""
        if name not in self._stored:
            raise CheckpointError(f"{self.folder} holds no {name}")
        stored = self._stored[name]
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.read([Piece(name, tuple(stored.size), (0,) * len(stored.size), whole)])
        return whole


class _Pieces(LoadPlanner):
    """Plans what to read into pieces."""

    def __init__(self, folder: Path, pieces: Iterable[Piece]):
        self.folder = folder
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._stored = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)

    def create_local_plan(self) -> LoadPlan:
        """What the stored rectangles and the pieces have in common, which must be the whole of the pieces."""
        plan = []
        for name, pieces in self._pieces.items():
            stored = self._stored.get(name)
            for piece in pieces:
                if stored is None or piece.shape != tuple(stored.size):
                    found = "nothing" if stored is None else f"shape {tuple(stored.size)}"
                    raise CheckpointError(f"{self.folder} has {found} for {name}, expected shape {piece.shape}")
            assert stored is not None
            items = create_read_items_for_chunk_list(name, stored, [_chunk(piece) for piece in pieces])
            assert sum(prod(item.lengths) for item in items) == sum(piece.data.numel() for piece in pieces)
            plan += items
        return LoadPlan(plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a piece's memory that is read next."""
        assert read_item.dest_index.index is not None
        target = self._pieces[read_item.dest_index.fqn][read_item.dest_index.index].data
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It has been read in place."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads on its own."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing changes a plan."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("only tensors are stored")
