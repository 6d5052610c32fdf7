"""Low-rank adapters (LoRA, arXiv:2106.09685) on disk: in checkpoints, merged into weights, and in PEFT's form.

A checkpoint stores A and B of each adapter under `lora.model.` (see `resharding.tables.adapter_rows`). A Hugging Face
module that Megatron fuses with others shares A with them, and has its own rows of B.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mindspeed_rl.checkpoint.files import fsync_path, write_json
from mindspeed_rl.checkpoint.tensors import StoredTensors
from mindspeed_rl.config.lora import FUSED_OF, LORA_A, LORA_B

ADAPTERS = "lora."  # what the names of adapters, and of their optimizer state, begin with
_STORED = f"{ADAPTERS}model."
_PEFT = "base_model.model."  # before all names in PEFT's files


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale B A (arXiv:2106.09685, section 4.1), in float32 and then rounded to the dtype of W.

    Args:
        weight: W, [out, in], or the part of a tensor-parallel rank.
        a: [rank, in], of the same columns.
        b: [out, rank], of the same rows.
        scale: alpha / rank.
    """
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


class StoredAdapters:
    """The adapters in a checkpoint's tensors.

    Args:
        tensors: of the checkpoint.
        settings: `r`, `alpha` and `target_modules`, as the checkpoint's driver has recorded them.
    """

    def __init__(self, tensors: StoredTensors, settings: Mapping[str, Any]):
        self.tensors, self.settings = tensors, settings
        self._names = {name.removeprefix(_STORED) for name in tensors.names(_STORED)}

    def _of_module(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A and B of a Hugging Face module, if it has an adapter."""
        parent, _, name = module.rpartition(".")
        if f"{module}.{LORA_B}" not in self._names:
            return None
        stored = f"{parent}.{FUSED_OF[name]}.{LORA_A}", f"{module}.{LORA_B}"
        a, b = (self.tensors.tensor(_STORED + each) for each in stored)
        return a, b

    def merged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that training started from, in the precision of training, with the adapters merged in."""
        dtype = self.tensors.tensor(_STORED + min(self._names)).dtype
        for name, tensor in weights:
            weight = tensor.to(dtype)
            adapter = self._of_module(name.removesuffix(".weight"))
            scale = self.settings["alpha"] / self.settings["r"]
            yield name, weight if adapter is None else merge(weight, *adapter, scale)

    def write_peft(self, folder: Path, base: str) -> None:
        """Write a folder in the form of Hugging Face's PEFT: `adapter_config.json`, `adapter_model.safetensors`.

        Args:
            folder: does not exist yet.
            base: where the weights are that the adapters belong to.
        """
        modules = sorted(name.removesuffix(f".{LORA_B}") for name in self._names if name.endswith(LORA_B))
        found: dict[str, torch.Tensor] = {}
        for module in modules:
            adapter = self._of_module(module)
            assert adapter is not None, "it has a B"
            # each module of a fused one has the whole of A: a file of safetensors does not share memory
            found |= {f"{_PEFT}{module}.{end}": part for end, part in zip((LORA_A, LORA_B), adapter, strict=True)}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": os.path.abspath(base),
            "r": self.settings["r"],
            "lora_alpha": self.settings["alpha"],
            "lora_dropout": 0.0,
            "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "inference_mode": True,
        }
        folder.mkdir()
        save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / "adapter_config.json", config)
        fsync_path(folder / "adapter_model.safetensors")
        fsync_path(folder)
