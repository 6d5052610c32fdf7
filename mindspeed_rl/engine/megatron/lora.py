"""Low-rank adapters (LoRA, arXiv:2106.09685, section 4.1) beside Megatron's linear layers.

A layer with frozen weights W gives W x + s B A x, with A [rank, in] and B [out, rank], s = alpha / rank. Tensor
parallelism cuts what it cuts of W: B's rows beside a column-parallel layer, A's columns beside a row-parallel one.
The other matrix is whole on every rank. What ranks exchange is [tokens, rank], little beside what the layer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from mindspeed_rl.checkpoint.lora import merge
from mindspeed_rl.config.lora import COLUMN_PARALLEL
from mindspeed_rl.config.model import AdaptedModel
from mindspeed_rl.engine.megatron.versions import leave_frozen_embeddings_alone
from mindspeed_rl.resharding.names import Parameter
from mindspeed_rl.resharding.tables import ADAPTER_A, ADAPTER_B, VALUE_HEAD


class Adapter(torch.nn.Module):
    """s B A, on this tensor-parallel rank."""

    def __init__(self, linear: Any, rank: int, scale: float, cuts_rows: bool):
        super().__init__()
        outputs, inputs = linear.weight.shape
        of_weight = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a = torch.nn.Parameter(torch.empty(rank, inputs, **of_weight))
        self.b = torch.nn.Parameter(torch.empty(outputs, rank, **of_weight))
        self.scale, self.is_enabled = scale, True
        self.sequence_parallel = linear.config.sequence_parallel
        self.cuts_rows = cuts_rows  # of the layer's weights, and B's; else A's columns
        # each rank applies the whole matrix to its own tokens: Megatron adds up the gradients of what has this mark
        whole: Any = self.a if self.cuts_rows else self.b
        whole.sequence_parallel = self.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output, of the same input: whole or divided over ranks as these are."""
        inner = F.linear(hidden, self.a)
        if self.cuts_rows:
            spread = (
                gather_from_sequence_parallel_region
                if self.sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
        else:
            spread = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        return F.linear(spread(inner), self.b) * self.scale


def _add(linear: Any, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, Any]) -> Any:
    if not linear.adapter.is_enabled:
        return outputs
    output, bias = outputs
    return output + linear.adapter(inputs[0]), bias


def _ask_for_gradient(embedding: torch.nn.Module, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Of a frozen embedding's output: recomputation passes gradients on only to a layer whose input asks for them."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden


def add_adapters(chunk: Any, model: AdaptedModel, scale: float) -> None:
    """Give a chunk's linear layers adapters, whose values are not set, and freeze all else but a value head."""
    for name, module in list(chunk.named_modules()):
        kind = name.rpartition(".")[2]
        if kind in model.adapted_modules and "experts" not in name:
            module.adapter = Adapter(module, model.adapter_rank, scale, kind in COLUMN_PARALLEL)
            module.register_forward_hook(_add)
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name == VALUE_HEAD.megatron)
    leave_frozen_embeddings_alone()
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(_ask_for_gradient)


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter."""
    return name.endswith((f".{ADAPTER_A}", f".{ADAPTER_B}"))


@torch.no_grad()
def initialise_adapters(
    adapters: Mapping[str, torch.nn.Parameter], held: Mapping[str, Parameter], seed: int, tp_rank: int, tp_size: int
) -> None:
    """A from a uniform distribution of variance 1 / (3 in), as torch's and PEFT's linear layers have it; B is 0.

    The whole of A is drawn, from a generator of its own, and cut: the same numbers in every layout.
    """
    for name, tensor in adapters.items():
        if name.endswith(ADAPTER_B):
            tensor.zero_()
            continue
        stream = np.random.SeedSequence([seed, crc32(name.encode())]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(stream))
        bound = 1 / sqrt(held[name].shape[1])
        whole = torch.empty(held[name].shape).uniform_(-bound, bound, generator=generator)
        tensor.copy_(held[name].shard(whole, tp_rank, tp_size))


@contextmanager
def without_adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """The model that training started from."""
    adapters = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.is_enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_enabled = True


class MergedWeights(Mapping[str, torch.Tensor]):
    """Shards by name, those with an adapter merged with it whenever they are asked for, and not kept."""

    def __init__(self, shards: Mapping[str, torch.Tensor], scale: float):
        self._shards, self._scale = shards, scale

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        module = name.removesuffix("weight")
        weight, a = self._shards[name], self._shards.get(module + ADAPTER_A)
        return weight if a is None else merge(weight, a, self._shards[module + ADAPTER_B], self._scale)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._shards if not is_adapter(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)
