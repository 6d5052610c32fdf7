"""Megatron-core parameter names, shapes and shards, and what they are called in a Hugging Face checkpoint.

A model family is a *table* of rows (see `tables`). One rule covers every row:

    a tensor-parallel shard  =  merge(its slice of each Hugging Face tensor)

Slices are even cuts along `tp_dim`. Merging one tensor does nothing; `gate_up` puts the gate rows above the up rows;
`qkv` interleaves by query group: (q rows, k rows, v rows) of the first group, then of the second, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Protocol

import torch

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.model import AdaptedModel, ModelConfig
from mindspeed_rl.resharding.tables import OUTPUT_LAYER, TABLES, VALUE_HEAD, Row, Transform, adapter_rows, sizes_of

Shape = tuple[int, ...]


class TensorReader(Protocol):
    """What `Parameter.load_shard` reads from."""

    def slice(self, name: str) -> Any:
        """An object with `get_shape()` whose `[...]` reads only the rows or columns asked for."""


@dataclass(frozen=True)
class Slab:
    """A rectangle of a Hugging Face tensor whose elements follow each other, row by row, in a rank's shard."""

    name: str  # of the Hugging Face tensor
    shape: Shape  # of that whole tensor
    offsets: Shape  # of the rectangle in it
    sizes: Shape
    start: int  # index of its first element in the flattened shard

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the rectangle in the Hugging Face tensor, which is contiguous."""
        offset, strides = self._in_tensor
        return tensor.as_strided(self.sizes, strides, int(tensor.storage_offset()) + offset)

    def of_shard(self, elements: torch.Tensor, start: int = 0) -> torch.Tensor:
        """A view of the rectangle in the contiguous elements of a flattened shard from `start` on."""
        return elements.as_strided(self.sizes, self._packed, int(elements.storage_offset()) + self.start - start)

    @cached_property
    def _in_tensor(self) -> tuple[int, Shape]:
        """Offset and strides there: one operation a view, for there may be thousands in an export."""
        strides = contiguous_strides(self.shape)
        return sum(map(mul, self.offsets, strides)), strides

    @cached_property
    def _packed(self) -> Shape:
        return contiguous_strides(self.sizes)


def contiguous_strides(shape: Shape) -> Shape:
    """Of a tensor whose elements follow each other, in elements."""
    return tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1]


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model.

    `full` tensors below are what Megatron holds without tensor parallelism: all heads, all rows, no vocabulary
    padding. `shard` adds zero rows so that the vocabulary divides evenly; `unshard` drops them again.
    """

    name: str  # Megatron name with the global indices of layer and expert
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    tp_dim: int | None
    transform: Transform
    groups: int  # query groups that `qkv` interleaves; 1 otherwise
    layer: int | None  # global layer index; None outside the layers
    expert: int | None = None  # index among all experts of the layer; None for what is no expert's
    is_float32: bool = False  # in training, whatever its precision

    @property
    def shape(self) -> Shape:
        """Shape of the full tensor."""
        return (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])

    def local_shape(self, tp_size: int) -> Shape:
        """Shape of one of `tp_size` shards."""
        pieces = self._piece_shapes(tp_size)
        return (sum(shape[0] for shape in pieces), *pieces[0][1:])

    def to_hf(self, full: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Hugging Face names and tensors of a full tensor; views of it where the memory order allows."""
        return self.shards_to_hf([full])

    def from_hf(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Full tensor from the Hugging Face tensors, in the order of `hf_names`."""
        return self._cut_and_merge(tensors, [tuple(tensor.shape) for tensor in tensors], 0, 1)

    def shard(self, full: torch.Tensor, tp_rank: int, tp_size: int) -> torch.Tensor:
        """The part of a full tensor that rank `tp_rank` of `tp_size` holds (possibly a view)."""
        tensors = [tensor for _, tensor in self.to_hf(full)]
        return self._cut_and_merge(tensors, self.hf_shapes, tp_rank, tp_size)

    def unshard(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Full tensor from all shards in the order of tensor-parallel ranks: the exact inverse of `shard`."""
        return self.from_hf([tensor for _, tensor in self.shards_to_hf(shards)])

    def load_shard(self, reader: TensorReader, tp_rank: int, tp_size: int) -> torch.Tensor:
        """This rank's part, reading no more of the checkpoint than that.

        Raises:
            CheckpointError: a tensor is missing, has another shape than the model, or cannot be cut `tp_size` ways.
        """
        slices = [reader.slice(name) for name in self.hf_names]
        return self._cut_and_merge(slices, [tuple(item.get_shape()) for item in slices], tp_rank, tp_size)

    def shards_to_hf(self, shards: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """`to_hf(unshard(shards))` without building the full Megatron tensor in between."""
        tp_size = len(shards)
        expected = self.local_shape(tp_size)
        for tp_rank, shard in enumerate(shards):
            if tuple(shard.shape) != expected:
                where = f"tensor-parallel rank {tp_rank} of {tp_size}"
                raise CheckpointError(f"{self.name} on {where} has shape {tuple(shard.shape)}, expected {expected}")
        if self.tp_dim is None:
            shards = shards[:1]
        rows = [shape[0] for shape in self._piece_shapes(tp_size)]
        pieces = [_split(shard, rows, self._local_groups(tp_size)) for shard in shards]
        tensors = [
            parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.tp_dim or 0)
            for parts in zip(*pieces, strict=True)
        ]
        return [
            (name, tensor[: shape[0]])  # drops the vocabulary padding
            for name, tensor, shape in zip(self.hf_names, tensors, self.hf_shapes, strict=True)
        ]

    def slabs(
        self, tp_rank: int, tp_size: int, start: int = 0, stop: int | None = None, most: int = 2**62
    ) -> Iterator[Slab]:
        """The rectangles that elements `start` to `stop` of a flattened shard consist of, in order.

        Vocabulary padding belongs to none. A slab has at most `most` elements, or one row if that is more.
        """
        pieces, groups = self._piece_shapes(tp_size), self._local_groups(tp_size)
        width = prod(pieces[0][1:])
        stop = prod(self.local_shape(tp_size)) if stop is None else stop
        top = 0  # row of the shard in which the next run of rows begins
        for group in range(groups):
            for name, full, piece in zip(self.hf_names, self.hf_shapes, pieces, strict=True):
                rows = piece[0] // groups
                first_row = group * rows + (tp_rank * piece[0] if self.tp_dim == 0 else 0)
                first_column = tp_rank * piece[1] if self.tp_dim == 1 else 0
                end = (top + min(rows, full[0] - first_row)) * width
                for at, height, columns in _rectangles(max(start, top * width), min(stop, end), width, most):
                    row, column = divmod(at - top * width, width)
                    offsets = (first_row + row, first_column + column)
                    yield Slab(name, full, offsets[: len(full)], (height, columns)[: len(full)], at)
                top += rows

    def _cut_and_merge(
        self, sources: Sequence[Any], shapes: Sequence[Shape], tp_rank: int, tp_size: int
    ) -> torch.Tensor:
        for name, shape, expected in zip(self.hf_names, shapes, self.hf_shapes, strict=True):
            if shape != expected:
                raise CheckpointError(f"{name} has shape {shape}, but the model's configuration says {expected}")
        piece_shapes = self._piece_shapes(tp_size)
        pieces = [
            self._cut(source, full, piece, tp_rank)
            for source, full, piece in zip(sources, self.hf_shapes, piece_shapes, strict=True)
        ]
        return _merge(pieces, self._local_groups(tp_size))

    def _cut(self, source: Any, full: Shape, piece: Shape, tp_rank: int) -> torch.Tensor:
        """Slice of a tensor, or of a reader's lazy slice; past the end of the vocabulary come zero rows."""
        if full == piece:
            return source[:]
        if self.tp_dim == 1:
            return source[:, tp_rank * piece[1] : (tp_rank + 1) * piece[1]].contiguous()
        start = min(tp_rank * piece[0], full[0])
        stop = min(start + piece[0], full[0])
        # a lazy slice cannot be empty, so a rank that holds nothing but padding reads one row and drops it
        rows = source[start:stop] if start < stop else source[:1][:0]
        missing = piece[0] - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, *piece[1:])]) if missing else rows

    def _piece_shapes(self, tp_size: int) -> list[Shape]:
        """Shape of one rank's slice of each Hugging Face tensor."""
        if self.tp_dim is None:
            return list(self.hf_shapes)
        if self.groups % tp_size and self.transform == "qkv":
            raise CheckpointError(f"{self.name}: {self.groups} query groups cannot be divided by TP size {tp_size}")
        pieces = []
        for shape in self.hf_shapes:
            size = shape[self.tp_dim]
            if size % tp_size and self.transform != "vocab":
                raise CheckpointError(f"{self.name}: dimension of {size} cannot be divided by TP size {tp_size}")
            pieces.append((*shape[: self.tp_dim], -(-size // tp_size), *shape[self.tp_dim + 1 :]))
        return pieces

    def _local_groups(self, tp_size: int) -> int:
        return self.groups // tp_size if self.transform == "qkv" else 1


def _merge(pieces: list[torch.Tensor], groups: int) -> torch.Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([piece.unflatten(0, (groups, -1)) for piece in pieces], dim=1).flatten(0, 1)


def _split(merged: torch.Tensor, rows: list[int], groups: int) -> list[torch.Tensor]:
    if len(rows) == 1:
        return [merged]
    pieces = merged.unflatten(0, (groups, -1)).split([count // groups for count in rows], dim=1)
    return [piece.flatten(0, 1) for piece in pieces]


def _rectangles(start: int, stop: int, width: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(first index, rows, columns) of what the indices `start` to `stop` cover of rows of `width` elements.

    Rows that are covered in part stand alone, before and after the whole ones.
    """
    while start < stop:
        whole_rows = 0 if start % width else (stop - start) // width
        rows = min(whole_rows, max(1, most // width)) or 1
        columns = width if whole_rows else min(width - start % width, stop - start)
        yield start, rows, columns
        start += rows * columns


def parameter_table(model: ModelConfig) -> list[Parameter]:
    """Every parameter of the whole model, from the embedding to the output layer; a tied output layer is absent."""
    return list(_table(model))


@lru_cache(maxsize=8)  # a mixture of experts has tens of thousands
def _table(model: ModelConfig) -> tuple[Parameter, ...]:
    rows = [row for row in TABLES[model.architecture] if row.condition is None or getattr(model, row.condition)]
    if not model.has_output_layer:
        rows = [row for row in rows if row.megatron != OUTPUT_LAYER]
    if model.has_value_head:
        rows.append(VALUE_HEAD)
    if isinstance(model, AdaptedModel):
        rows += adapter_rows(rows, model.adapted_modules)
    of_layer = [row for row in rows if "{layer}" in row.megatron]
    first = rows.index(of_layer[0])  # rows above the layers' rows come before the layers, rows below after them
    return (
        *(make_parameter(row, model) for row in rows[:first]),
        *(parameter for layer in range(model.num_layers) for parameter in _layer_parameters(of_layer, model, layer)),
        *(make_parameter(row, model) for row in rows[first:] if row not in of_layer),
    )


def _layer_parameters(rows: Iterable[Row], model: ModelConfig, layer: int) -> Iterator[Parameter]:
    kind = "moe" if model.is_moe_layer(layer) else "dense"
    for row in rows:
        if row.layers in (None, kind):
            experts = range(model.num_moe_experts or 0) if "{expert}" in row.megatron else (None,)
            yield from (make_parameter(row, model, layer, expert) for expert in experts)


def check_hf_names(model: ModelConfig, names: Iterable[str]) -> None:
    """Check that a Hugging Face checkpoint holds the model's tensors and no others.

    A stored copy of a tied output layer and the rotary frequencies that old files contain are let pass; so are, with
    DeepSeek-V3, layers past the model's own: they predict further tokens (MTP) and are neither trained nor kept.

    Raises:
        CheckpointError: tensors are missing or would be lost, and lists them; or the weights are fp8 with scales.
    """
    names = list(names)
    if scales := [name for name in names if name.endswith("weight_scale_inv")]:
        raise CheckpointError(
            f"the {model.architecture} checkpoint holds fp8 weights with {len(scales)} tensors of scales, such as "
            f"{scales[0]}: convert it to bfloat16 first"
        )
    expected = {name for parameter in parameter_table(model) for name in parameter.hf_names}
    found = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    if not model.untie_embeddings_and_output_weights:
        found.discard("lm_head.weight")
    if model.architecture == "DeepseekV3ForCausalLM":
        found = {name for name in found if _hf_layer(name) < model.num_layers}
    for problem, difference in (("lacks", expected - found), ("has unexpected", found - expected)):
        if difference:
            listed = ", ".join(sorted(difference))
            raise CheckpointError(
                f"the {model.architecture} checkpoint {problem} {len(difference)} tensors: {listed}"
            )


def _hf_layer(name: str) -> int:
    """Index of the layer that a Hugging Face name is of; -1 outside the layers."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else -1


def make_parameter(row: Row, model: ModelConfig, layer: int | None = None, expert: int | None = None) -> Parameter:
    """Fill a row of the table with a model's sizes and the indices of a layer and an expert of it."""
    sizes = sizes_of(model)
    return Parameter(
        name=row.megatron.format(layer=layer, expert=expert),
        hf_names=tuple(name.format(layer=layer, expert=expert) for name in row.hf),
        hf_shapes=tuple(tuple(sizes[size] for size in shape) for shape in row.hf.values()),
        tp_dim=row.tp_dim,
        transform=row.transform,
        groups=model.num_query_groups if row.transform == "qkv" else 1,
        layer=layer,
        expert=expert,
        is_float32=row.is_float32,
    )


_LAYER_INDEX = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")
_EXPERT_INDEX = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


def global_name(local_name: str, layer_offset: int, expert_offset: int = 0) -> str:
    """Name in the whole model of a rank's parameter.

    `layer_offset` is the first layer of the part of the model that the rank's name counts in, `expert_offset` the
    first expert that the rank holds.
    """
    name = _LAYER_INDEX.sub(lambda match: str(int(match.group()) + layer_offset), local_name)
    return _EXPERT_INDEX.sub(lambda match: str(int(match.group()) + expert_offset), name) if expert_offset else name
