"""Training checkpoints that are complete or absent, whatever moment the run is stopped at.

    root/latest                 name of the newest complete checkpoint
    root/iter_0000012/          one checkpoint
        tensors/                weights and optimizer state under Hugging Face names, for any layout (`tensors.py`)
        rank_00000.pt …         small state of each rank: learning-rate schedule, random numbers
        trainer.json            state of the driver: iteration, data position, KL controller, layout, versions
        hf/                     config.json and tokenizer files of the model, if given; its weights, if asked for
        adapter/                with those, if adapters were trained (LoRA): these alone, in PEFT's form
        manifest.json           size and SHA-256 of every file above; written last

All ranks write into `root/.tmp-iter_0000012`, each a `rank_00000.written` when it is done. When all are the driver
commits: `.metadata` of the tensors, manifest, rename, `latest`.
Only one run may write to a root; the root is on storage that all ranks share.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

from mindspeed_rl.checkpoint.files import copy_hf_files, fsync_path, read_json, write_file, write_json
from mindspeed_rl.checkpoint.hf import HFWeights, add_hf_weights, is_hf_folder
from mindspeed_rl.checkpoint.lora import StoredAdapters
from mindspeed_rl.checkpoint.tensors import (
    METADATA,
    HashingFile,
    Piece,
    StoredTensors,
    Written,
    alone,
    complete,
    file_name,
    write_pieces,
)
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.common.versions import package_versions
from mindspeed_rl.config.files import HF_FOLDER, LATEST, MANIFEST
from mindspeed_rl.config.model import ModelConfig

FORMAT = 2
TRAINER, TENSORS, ADAPTER_FOLDER = "trainer.json", "tensors", "adapter"
WEIGHTS = "model."  # what the names of the model's weights begin with among the tensors
RETIRED = ".old-"  # prefix of a checkpoint while another of the same iteration takes its place
WRITTEN, FAILED = ".written", ".failed"  # suffixes of what a rank tells the driver while a checkpoint is pending
# What torch.load(weights_only=True) reads without exceptions to the rule; nothing else may be in a rank's state.
PLAIN_TYPES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class ParallelSizes(Protocol):
    """What a checkpoint records of a parallel layout. What belongs to single ranks goes on only in the same one."""

    @property
    def world(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def ep(self) -> int: ...


class CheckpointStore:
    """Writes the checkpoints of one run. The driver and every worker have one of their own for the same root.

    Args:
        root: folder of the checkpoints.
        hf_folder: Hugging Face folder whose config.json and tokenizer files each checkpoint is to carry.
        model: shape of the model, recorded for readers.
        layout: layout of the ranks that write. The driver's store needs it, a worker's store needs only `root`.
    """

    def __init__(
        self,
        root: str | Path,
        hf_folder: str | Path | None = None,
        model: ModelConfig | None = None,
        layout: ParallelSizes | None = None,
    ):
        self.root, self.hf_folder, self.model, self.layout = Path(root), hf_folder, model, layout

    def begin(self, iteration: int) -> None:
        """Driver: make room for a checkpoint. Remains of a run that was stopped while saving are removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        for stale in self.root.glob(".tmp-*"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        for retired in self.root.glob(f"{RETIRED}*"):
            replacement = retired.with_name(retired.name.removeprefix(RETIRED))
            shutil.rmtree(retired) if replacement.exists() else os.replace(retired, replacement)
        pending = self._pending(iteration)
        pending.mkdir()
        (pending / TENSORS).mkdir()
        if self.hf_folder is not None:
            (pending / HF_FOLDER).mkdir()
            copy_hf_files(Path(self.hf_folder), pending / HF_FOLDER)
            fsync_path(pending / HF_FOLDER)

    def write_rank(self, iteration: int, rank: int, pieces: Iterable[Piece], state: Mapping[str, Any]) -> None:
        """Worker: write a rank's part, after `begin` and before `commit`.

        Args:
            pieces: this rank's share of the tensors; consumed one by one.
            state: nested dicts, lists and tuples of small tensors and plain Python values (`PLAIN_TYPES`).

        Raises:
            CheckpointError: `begin` was not called, or a value could not be read back safely; names its key.
        """
        pending = self._pending(iteration)
        if not pending.is_dir():
            raise CheckpointError(f"{pending} does not exist: checkpoint {iteration} was not begun on this storage")
        path = pending / _rank_file(rank)
        with path.open("wb") as file:
            hashing = HashingFile(file)
            torch.save(_storable(state, "state"), cast(IO[bytes], hashing))
            hashing.sync()
        written = write_pieces(pending / TENSORS / file_name(rank), pieces)
        _note(path.with_suffix(WRITTEN), pickle.dumps((written, hashing.record())))

    def report_failure(self, iteration: int, rank: int, error: BaseException) -> None:
        """Worker: tell the driver, which may not be waiting for this rank, that `write_rank` has failed."""
        _note((self._pending(iteration) / _rank_file(rank)).with_suffix(FAILED), repr(error).encode())

    def is_written(self, iteration: int) -> bool:
        """Driver: whether all ranks have written their parts.

        Raises:
            CheckpointError: one has reported a failure.
        """
        for path in self._pending(iteration).glob(f"*{FAILED}"):
            reason = path.read_text(encoding="utf-8")
            raise CheckpointError(f"checkpoint {iteration} could not be written: {path.stem}: {reason}")
        return not self._missing(iteration)

    def _missing(self, iteration: int) -> list[str]:
        assert self.layout is not None, "the driver's store knows the layout"
        ranks = [_rank_file(rank) for rank in range(self.layout.world)]
        return [file for file in ranks if not (self._pending(iteration) / file).with_suffix(WRITTEN).is_file()]

    def commit(
        self,
        iteration: int,
        trainer_state: Mapping[str, Any],
        attachments: Mapping[str, Any] | None = None,
        hf_weights: bool = False,
    ) -> Path:
        """Driver: make the checkpoint visible once all ranks have written.

        Args:
            trainer_state: JSON values (string keys). Model, layout and versions are added to it.
            attachments: further objects, each pickled to a file of its name.
            hf_weights: complete `hf` with the weights, read from the tensors; a file of them is in memory at a time.
                Where adapters were trained, write these into `adapter`, too.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: ranks have not written, or not all of a tensor; lists them.
        """
        pending, target = self._pending(iteration), self.root / _name(iteration)
        if missing := self._missing(iteration):
            raise CheckpointError(f"checkpoint {iteration} cannot be completed: {', '.join(missing)} not written")
        files = self._complete_tensors(pending)
        assert self.layout is not None
        described = {
            "model": self.model.model_dump() if self.model else None,
            "layout": _sizes(self.layout),
            "versions": package_versions(),
        }
        write_json(pending / TRAINER, {"iteration": iteration, **trainer_state, **described})
        attached = [pending / name for name in attachments or {}]
        for path, content in zip(attached, (attachments or {}).values(), strict=True):
            write_file(path, pickle.dumps(content))
        if hf_weights:
            tensors = StoredTensors(pending / TENSORS)
            add_hf_weights(pending / HF_FOLDER, _weights(tensors, trainer_state))
            if trainer_state.get("lora"):
                adapters = StoredAdapters(tensors, trainer_state["lora"])
                adapters.write_peft(pending / ADAPTER_FOLDER, trainer_state["start_weights"])
        of_folders = (sorted((pending / folder).glob("*")) for folder in (HF_FOLDER, ADAPTER_FOLDER))
        for path in [pending / TRAINER, *attached, *chain(*of_folders)]:
            files[str(path.relative_to(pending))] = _file_record(path)
        write_json(pending / MANIFEST, {"format": FORMAT, "files": files})
        self._publish(pending, target)
        return target

    def _complete_tensors(self, pending: Path) -> dict[str, dict[str, Any]]:
        """Write `.metadata` of what the ranks have written; records of the files of both, by name."""
        files, parts = {}, []
        assert self.layout is not None
        for rank in range(self.layout.world):
            note = (pending / _rank_file(rank)).with_suffix(WRITTEN)
            written: Written
            written, files[_rank_file(rank)] = pickle.loads(note.read_bytes())
            files[f"{TENSORS}/{file_name(rank)}"] = written.record
            parts.append(written)
        complete(pending / TENSORS, parts)
        for note in pending.glob(f"*{WRITTEN}"):
            note.unlink()
        fsync_path(pending / TENSORS)
        files[f"{TENSORS}/{METADATA}"] = _file_record(pending / TENSORS / METADATA)
        return files

    def _publish(self, pending: Path, target: Path) -> None:
        """Rename into place and point `latest` there. An older checkpoint of the name stays until that is done."""
        retired = _retired(target)
        if target.exists():
            shutil.rmtree(retired, ignore_errors=True)
            os.replace(target, retired)
        os.replace(pending, target)
        fsync_path(self.root)
        write_file(self.root / LATEST, f"{target.name}\n".encode())
        shutil.rmtree(retired, ignore_errors=True)

    def retain(self, count: int, needed: str | Path | None = None) -> None:
        """Driver: remove all checkpoints but the newest `count`, as they are on disk now, whoever wrote them.

        Args:
            needed: a checkpoint that stays in any case.
        """
        complete = sorted(path for path in self.root.glob("iter_*") if (path / MANIFEST).is_file())
        kept = {path.resolve() for path in (self.latest(), needed and Path(needed)) if path}
        for path in complete[:-count]:
            if path.resolve() not in kept:
                gone = self.root / f".tmp-gone-{path.name}"  # what is left of it if stopped here, `begin` removes
                os.replace(path, gone)
                shutil.rmtree(gone)

    def latest(self) -> Path | None:
        """Folder of the newest complete checkpoint; None if there is none.

        Raises:
            CheckpointError: `latest` names a checkpoint that is gone.
        """
        pointer = self.root / LATEST
        if not pointer.is_file():
            return None
        target = self.root / pointer.read_text(encoding="utf-8").strip()
        for path in (target, _retired(target)):  # the second: stopped between the two renames of `_publish`
            if path.is_dir():
                return path
        raise CheckpointError(f"{pointer} names {target.name}, which does not exist")

    @staticmethod
    def find(path: str | Path) -> Path:
        """Folder of a checkpoint: `path` itself, or the newest one if `path` is a root of checkpoints.

        Raises:
            CheckpointError: `path` is neither.
        """
        if not is_checkpoint(path):
            what = "holds no complete checkpoint" if Path(path).is_dir() else "does not exist"
            raise CheckpointError(f"checkpoint {path} {what}")
        return CheckpointStore(path).latest() or Path(path)

    @staticmethod
    def load_trainer(path: str | Path) -> dict[str, Any]:
        """Driver: what `commit` was given, after checking that the checkpoint is complete."""
        return open_checkpoint(path).trainer

    def _pending(self, iteration: int) -> Path:
        return self.root / f".tmp-{_name(iteration)}"


class CheckpointReader:
    """A complete checkpoint's folder: `trainer` state now, tensors and ranks' state on demand.

    Raises:
        CheckpointError: it does not exist, was never completed, or a file of it is missing, truncated or corrupt.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"checkpoint {self.path} does not exist")
        if not (self.path / MANIFEST).is_file():
            raise CheckpointError(f"{self.path} is not a complete checkpoint: {MANIFEST} is missing")
        manifest = read_json(self.path / MANIFEST)
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
            raise CheckpointError(f"{self.path / MANIFEST} is corrupt: it lists no files")
        if manifest.get("format") != FORMAT:
            hint = "format 1 can be converted to a Hugging Face folder by the version that wrote it"
            raise CheckpointError(
                f"{self.path} has format {manifest.get('format')!r}; this version reads {FORMAT} ({hint})"
            )
        self._files: dict[str, dict[str, Any]] = manifest["files"]
        for name in self._files:
            self._check_size(name)
        self._check_content(TRAINER)
        self.trainer: dict[str, Any] = read_json(self.path / TRAINER)

    @property
    def layout(self) -> dict[str, int]:
        """The layout that wrote the checkpoint: the sizes `world`, `tp`, `pp`, `dp` and `ep`."""
        return self.trainer["layout"]

    @property
    def model(self) -> ModelConfig | None:
        """Shape of the model, if the writer recorded it."""
        return ModelConfig(**self.trainer["model"]) if self.trainer["model"] else None

    @property
    def hf_folder(self) -> Path | None:
        """Folder with the model's config.json and tokenizer files, if the checkpoint carries them."""
        folder = self.path / HF_FOLDER
        return folder if folder.is_dir() else None

    @cached_property
    def tensors(self) -> StoredTensors:
        """The tensors; of their files only `.metadata` has been checked (see `check_tensors`).

        Raises:
            CheckpointError: `.metadata` is corrupt.
        """
        self._check_content(f"{TENSORS}/{METADATA}")
        return StoredTensors(self.path / TENSORS)

    @property
    def weight_names(self) -> list[str]:
        """Hugging Face names of the model's weights."""
        if self.trainer.get("lora"):
            return _start_names(self.trainer["start_weights"])
        return [name.removeprefix(WEIGHTS) for name in self.tensors.names(WEIGHTS)]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and whole tensors of the model's weights, read one by one.

        Raises:
            CheckpointError: the checkpoint holds adapters, and the weights that they belong to are not there.
        """
        return _weights(self.tensors, self.trainer)

    def check_tensors(self, part: int = 0, parts: int = 1) -> None:
        """Check the content of every `parts`-th file of tensors: together, `parts` ranks check each once.

        Raises:
            CheckpointError: a file is corrupt.
        """
        for name in sorted(name for name in self._files if name.startswith(f"{TENSORS}/"))[part::parts]:
            self._check_content(name)

    def load_rank(self, rank: int, layout: ParallelSizes) -> dict[str, Any]:
        """A rank's small state, on the CPU, after checking its file's content.

        In another layout than the one that wrote it, it is that of rank 0, without what belongs to a rank (`rng`).

        Raises:
            CheckpointError: the file is corrupt.
        """
        is_same = _sizes(layout) == self.layout
        name = _rank_file(rank if is_same else 0)
        self._check_content(name)
        state = torch.load(self.path / name, map_location="cpu", weights_only=True)
        return state if is_same else {key: value for key, value in state.items() if key != "rng"}

    def attachment(self, name: str) -> Any:
        """The object in a further file, which this trainer has pickled: only open checkpoints that you trust.

        Raises:
            CheckpointError: there is no such file, it is corrupt, or another version wrote it.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.path} holds no {name}")
        self._check_content(name)
        try:
            return pickle.loads((self.path / name).read_bytes())
        except (pickle.UnpicklingError, AttributeError, ImportError, TypeError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read by this version: {error}") from error

    def _check_size(self, name: str) -> None:
        path, expected = self.path / name, self._files[name]["bytes"]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        found = path.stat().st_size
        if found != expected:
            what = "truncated" if found < expected else "corrupt"
            raise CheckpointError(f"{path} is {what}: {found} bytes instead of {expected}")

    def _check_content(self, name: str) -> None:
        if _file_record(self.path / name) != self._files[name]:
            raise CheckpointError(f"{self.path / name} is corrupt: its content does not match {MANIFEST}")


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is a checkpoint, or a root of checkpoints, of this format."""
    return any((Path(path) / name).is_file() for name in (MANIFEST, LATEST))


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Open a checkpoint's folder, or the newest checkpoint under a root.

    Raises:
        CheckpointError: see `CheckpointReader`.
    """
    return CheckpointReader(CheckpointStore.find(path))


def _weights(tensors: StoredTensors, trainer: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if trainer.get("lora"):
        return StoredAdapters(tensors, trainer["lora"]).merged(_start_weights(trainer["start_weights"]))
    return ((name.removeprefix(WEIGHTS), tensors.tensor(name)) for name in tensors.names(WEIGHTS))


def _start_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What a run started from: a Hugging Face folder, or a checkpoint."""
    if not is_hf_folder(path):
        return CheckpointReader(path).weights()
    stored = HFWeights(path)
    return ((name, stored.tensor(name)) for name in stored.names)


def _start_names(path: str) -> list[str]:
    return HFWeights(path).names if is_hf_folder(path) else CheckpointReader(path).weight_names


def _note(path: Path, content: bytes) -> None:
    """A file for the driver of this run, that appears whole; no later run will look for it, whatever happens."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _retired(target: Path) -> Path:
    return target.with_name(f"{RETIRED}{target.name}")


def _sizes(layout: ParallelSizes) -> dict[str, int]:
    return {name: getattr(layout, name) for name in ("world", "tp", "pp", "dp", "ep")}


def _storable(value: Any, where: str) -> Any:
    """A copy of the structure with every tensor on the CPU and in storage of its own size."""
    if isinstance(value, torch.Tensor):
        return alone(value)
    if type(value) in (dict, OrderedDict):
        return {_plain(key, f"{where} (key)"): _storable(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple, torch.Size):
        items = [_storable(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if type(value) is list else tuple(items)
    return _plain(value, where)


def _plain(value: Any, where: str) -> Any:
    if type(value) not in PLAIN_TYPES:
        raise CheckpointError(f"{where} is a {type(value).__qualname__}: only tensors and plain values can be saved")
    return value


def _file_record(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}
