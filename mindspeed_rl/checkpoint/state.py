"""Training checkpoints that are complete or absent, whatever moment the run is stopped at.

    root/latest                 name of the newest complete checkpoint
    root/iter_0000012/          one checkpoint
        rank_00000.pt …         state of each rank: model, optimizer, scheduler, random numbers
        trainer.json            state of the driver: iteration, data position, KL controller, layout, versions
        hf/                     config.json and tokenizer files of the model, if given; its weights, if asked for
        manifest.json           size and SHA-256 of every file above; written last

All ranks write into `root/.tmp-iter_0000012`. When they are done the driver commits: manifest, rename, `latest`.
Only one run may write to a root; the root is on storage that all ranks share.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

import torch

from mindspeed_rl.checkpoint.files import copy_hf_files, fsync_path, read_json, write_file, write_json
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.common.versions import package_versions
from mindspeed_rl.config.files import HF_FOLDER, LATEST, MANIFEST
from mindspeed_rl.config.model import ModelConfig

FORMAT = 1
TRAINER = "trainer.json"
RETIRED = ".old-"  # prefix of a checkpoint while another of the same iteration takes its place
# What torch.load(weights_only=True) reads without exceptions to the rule; nothing else may be in a rank's state.
PLAIN_TYPES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class ParallelSizes(Protocol):
    """What a checkpoint records of a parallel layout, and compares when it is loaded."""

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
        if self.hf_folder is not None:
            (pending / HF_FOLDER).mkdir()
            copy_hf_files(Path(self.hf_folder), pending / HF_FOLDER)
            fsync_path(pending / HF_FOLDER)

    def write_rank(self, iteration: int, rank: int, state: Mapping[str, Any]) -> None:
        """Worker: write a rank's state, after `begin` and before `commit`.

        Args:
            state: nested dicts, lists and tuples of tensors and plain Python values (`PLAIN_TYPES`).

        Raises:
            CheckpointError: `begin` was not called, or a value could not be read back safely; names its key.
        """
        pending = self._pending(iteration)
        if not pending.is_dir():
            raise CheckpointError(f"{pending} does not exist: checkpoint {iteration} was not begun on this storage")
        path = pending / _rank_file(rank)
        with path.open("wb") as file:
            hashing = _HashingFile(file)
            torch.save(_storable(state, "state"), cast(IO[bytes], hashing))
            file.flush()
            os.fsync(file.fileno())
        write_json(path.with_suffix(".json"), hashing.record())

    def commit(
        self, iteration: int, trainer_state: Mapping[str, Any], attachments: Mapping[str, Any] | None = None
    ) -> Path:
        """Driver: make the checkpoint visible once all ranks have written.

        Args:
            trainer_state: JSON values (string keys). Model, layout and versions are added to it.
            attachments: further objects, each pickled to a file of its name.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: ranks have not written; lists them.
        """
        assert self.layout is not None, "the driver's store knows the layout"
        pending, target = self._pending(iteration), self.root / _name(iteration)
        ranks = [_rank_file(rank) for rank in range(self.layout.world)]
        missing = [file for file in ranks if not (pending / file).with_suffix(".json").is_file()]
        if missing:
            raise CheckpointError(f"checkpoint {iteration} cannot be completed: {', '.join(missing)} not written")
        described = {
            "model": self.model.model_dump() if self.model else None,
            "layout": _sizes(self.layout),
            "versions": package_versions(),
        }
        write_json(pending / TRAINER, {"iteration": iteration, **trainer_state, **described})
        files = {file: read_json((pending / file).with_suffix(".json")) for file in ranks}
        attached = [pending / name for name in attachments or {}]
        for path, content in zip(attached, (attachments or {}).values(), strict=True):
            write_file(path, pickle.dumps(content))
        for path in [pending / TRAINER, *attached, *sorted((pending / HF_FOLDER).glob("*"))]:
            files[str(path.relative_to(pending))] = _file_record(path)
        for file in ranks:
            (pending / file).with_suffix(".json").unlink()
        write_json(pending / MANIFEST, {"format": FORMAT, "files": files})
        self._publish(pending, target)
        return target

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

    def hf_weights(self, iteration: int) -> Path:
        """Worker: folder for Hugging Face weights in a checkpoint that the driver has begun and will commit."""
        return self._pending(iteration) / HF_FOLDER

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
    """A complete checkpoint's folder: `trainer` state now, rank states on demand.

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
            raise CheckpointError(f"{self.path} has format {manifest.get('format')!r}; this version reads {FORMAT}")
        self._files: dict[str, dict[str, Any]] = manifest["files"]
        for name in self._files:
            self._check_size(name)
        self._check_content(TRAINER)
        self.trainer: dict[str, Any] = read_json(self.path / TRAINER)

    @property
    def layout(self) -> dict[str, int]:
        """The layout that wrote the checkpoint: the sizes `world`, `tp`, `pp`, `dp` and `ep`."""
        return {"ep": 1, **self.trainer["layout"]}  # checkpoints from before there were experts do not say

    @property
    def model(self) -> ModelConfig | None:
        """Shape of the model, if the writer recorded it."""
        return ModelConfig(**self.trainer["model"]) if self.trainer["model"] else None

    @property
    def hf_folder(self) -> Path | None:
        """Folder with the model's config.json and tokenizer files, if the checkpoint carries them."""
        folder = self.path / HF_FOLDER
        return folder if folder.is_dir() else None

    def load_rank(self, rank: int, layout: ParallelSizes | None = None, mmap: bool = False) -> dict[str, Any]:
        """A rank's state, on the CPU, after checking its file's content.

        Args:
            layout: the layout to load into; None for readers that take any.
            mmap: leave tensors in the file until they are used.

        Raises:
            CheckpointError: another layout wrote the checkpoint (names both), or the file is corrupt.
        """
        if layout is not None:
            self.check_layout(layout)
        name = _rank_file(rank)
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no rank {rank}: layout {self.layout} wrote it")
        self._check_size(name)
        self._check_content(name)
        return torch.load(self.path / name, map_location="cpu", weights_only=True, mmap=mmap)

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

    def check_layout(self, layout: ParallelSizes) -> None:
        """Raise `CheckpointError`, naming both, if another layout wrote the checkpoint."""
        if _sizes(layout) != self.layout:
            raise CheckpointError(
                f"{self.path} was written by layout {self.layout} and cannot be loaded into layout {_sizes(layout)}: "
                "use the same layout, or convert the weights to a Hugging Face folder and load that"
            )

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


def load_rank(path: str | Path, rank: int, layout: ParallelSizes) -> dict[str, Any]:
    """Worker: a rank's state of `open_checkpoint(path)`."""
    return open_checkpoint(path).load_rank(rank, layout)


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
        tensor = value.detach().cpu()
        # torch.save writes the whole storage under a view
        return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
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


class _HashingFile:
    """What torch.save writes to: passes bytes on and keeps their number and SHA-256."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest, self._bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def record(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def _file_record(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}
