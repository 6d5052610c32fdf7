"""Weights in Hugging Face folders: reading slices of safetensors files, writing folders that transformers loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mindspeed_rl.checkpoint.files import copy_hf_files, fsync_path, new_folder, read_json, write_json
from mindspeed_rl.common.errors import CheckpointError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def is_hf_folder(path: str | Path) -> bool:
    """Whether a folder holds a model in Hugging Face form (and not a checkpoint of this trainer)."""
    return (Path(path) / "config.json").exists()


class HFWeights:
    """The tensors of a Hugging Face folder, in one safetensors file or several with an index; read when asked for.

    Raises:
        CheckpointError: the folder or a file of it is missing, truncated or corrupt; names the file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"Hugging Face folder {self.folder} does not exist")
        if (self.folder / INDEX_FILE).is_file():
            index = read_json(self.folder / INDEX_FILE)
            if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
                raise CheckpointError(f"{self.folder / INDEX_FILE} is corrupt: it has no weight_map")
            weight_map: dict[str, str] = index["weight_map"]
            self._files = {file: self._open(file) for file in sorted(set(weight_map.values()))}
            self._locations = weight_map
            for name, file in weight_map.items():
                if name not in self._files[file].keys():  # noqa: SIM118 - not a mapping
                    raise CheckpointError(f"{self.folder / file} lacks {name}, which {INDEX_FILE} places there")
        elif (self.folder / SINGLE_FILE).is_file():
            self._files = {SINGLE_FILE: self._open(SINGLE_FILE)}
            self._locations = dict.fromkeys(self._files[SINGLE_FILE].keys(), SINGLE_FILE)
        else:
            raise CheckpointError(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")

    def _open(self, file: str) -> Any:
        path = self.folder / file
        try:
            return safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except SafetensorError as error:
            raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._locations)

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        return read_json(self.folder / "config.json")

    def require(self, names: Iterable[str]) -> None:
        """Check that tensors exist.

        Raises:
            CheckpointError: lists all that do not.
        """
        missing = [name for name in names if name not in self._locations]
        if missing:
            raise CheckpointError(f"{self.folder} lacks {len(missing)} tensors: {', '.join(missing)}")

    def slice(self, name: str) -> Any:
        """A lazy tensor: `get_shape()`, and `[rows, columns]` which reads just those."""
        self.require([name])
        return self._files[self._locations[name]].get_slice(name)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A whole tensor on the CPU, in the stored dtype.

        Raises:
            CheckpointError: it is missing, or its shape is not `shape`.
        """
        found = tuple(self.slice(name).get_shape())
        if shape is not None and found != shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {found}, expected {shape}")
        return self._files[self._locations[name]].get_tensor(name)


def write_hf(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    source_folder: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a Hugging Face folder that appears in one step, holding at most one shard in memory.

    Args:
        tensors: names and tensors, consumed one by one.
        source_folder: folder whose config.json and tokenizer files are copied.
        dtype: convert floating-point tensors to this; None keeps theirs.
        max_shard_bytes: largest safetensors file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: `folder` exists already, or `source_folder` has no config.json.
    """
    with new_folder(Path(folder)) as temporary:
        copy_hf_files(Path(source_folder), temporary)
        add_hf_weights(temporary, tensors, dtype, max_shard_bytes)


def add_hf_weights(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Put weights into a folder that has config.json and tokenizer files; arguments as of `write_hf`."""
    shards = _write_shards(folder, tensors, dtype, max_shard_bytes)
    if len(shards) == 1:
        os.replace(folder / _numbered(0, 0), folder / SINGLE_FILE)
    else:
        _write_index(folder, shards)
    _update_config(folder / "config.json", shards)


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, max_shard_bytes: int
) -> list[dict[str, torch.Tensor]]:
    """Write the files under preliminary names; returns their contents as tensors without data."""
    shards: list[dict[str, torch.Tensor]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = 0

    def flush() -> None:
        path = folder / _numbered(len(shards), 0)
        save_file(pending, path, metadata={"format": "pt"})
        fsync_path(path)
        shards.append({name: tensor.to("meta") for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if pending and pending_bytes + tensor.numel() * target.itemsize > max_shard_bytes:
            flush()
            pending_bytes = 0
        # a copy: the source may reuse its memory, and a view would keep the whole of it alive
        pending[name] = tensor.detach().to("cpu", target, copy=True, memory_format=torch.contiguous_format)
        pending_bytes += pending[name].nbytes
    if pending or not shards:
        flush()
    return shards


def _numbered(index: int, total: int) -> str:
    return f"model-{index + 1:05d}-of-{total:05d}.safetensors"


def _write_index(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    weight_map = {}
    for index, shard in enumerate(shards):
        final = _numbered(index, len(shards))
        os.replace(folder / _numbered(index, 0), folder / final)
        weight_map.update(dict.fromkeys(shard, final))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _update_config(path: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """State the dtype that most weights have, so that transformers loads them as they are, and what is not there."""
    sizes: dict[str, int] = {}
    for shard in shards:
        for tensor in shard.values():
            name = str(tensor.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + tensor.numel()
    if not sizes:
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # the older name stays where it is used
    config[key] = max(sizes, key=lambda name: sizes[name])
    if config.get("num_nextn_predict_layers"):  # DeepSeek-V3: layers that the trainer leaves out
        config["num_nextn_predict_layers"] = 0
    write_json(path, config)
