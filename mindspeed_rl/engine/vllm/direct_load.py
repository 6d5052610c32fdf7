"""vLLM on CUDA: new weights go where its loader has put the first ones, without the loader's time for each tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

logger = logging.getLogger(__name__)

aten = torch.ops.aten


Form = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, strides and type of a tensor


def _form(tensor: torch.Tensor) -> Form:
    return tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True)
class Copy:
    """A part of a given tensor, its offset there in elements, and the part of a parameter that it goes to."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    target: torch.Tensor


class WatchedLoad(TorchDispatchMode):
    """Notes what is written into the parameters of a model, and which given tensors it comes from.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        parameters = list(model.parameters())
        self._storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._unwritten = sum(parameter.numel() for parameter in parameters)
        self._current: tuple[str, torch.Tensor] | None = None  # what the loader works with
        self._unknown = False
        self.given: dict[str, Form] = {}
        self.copies: dict[str, list[Copy]] = {}
        self.constants: list[tuple[torch.Tensor, Any]] = []

    @property
    def is_complete(self) -> bool:
        """As many elements were written as the parameters have, with copies of given tensors and constants alone."""
        return not self._unknown and self._unwritten == 0

    def remember(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same weights, remembered; how they are made is not watched."""
        iterator = iter(weights)
        while True:
            with _disable_current_modes():
                name, tensor = next(iterator, ("", None))
            if tensor is None:
                return
            self.given[name], self.copies[name] = _form(tensor), []
            self._current = name, tensor
            yield name, tensor
            self._current = None  # its memory may be another tensor's from now on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        result = func(*args, **(kwargs or {}))
        if func == aten._local_scalar_dense.default:
            self._unknown = True  # values that are given become constants, or decide what is done
        elif func._schema.is_mutable:
            target = args[0] if args else None
            if not isinstance(target, torch.Tensor) or self._is_given(target):
                self._unknown = True
            elif target.untyped_storage().data_ptr() in self._storages:
                self._written(func, *args)
        return result

    def _written(self, func: Any, target: torch.Tensor, value: Any = 0, *_: Any) -> None:
        self._unwritten -= target.numel()
        if func in (aten.fill_.Scalar, aten.zero_.default):
            self.constants.append((target, value))
        elif func == aten.copy_.default and self._current is not None and self._is_given(value):
            name, whole = self._current
            offset = int(value.storage_offset() - whole.storage_offset())
            self.copies[name].append(Copy(value.shape, value.stride(), offset, target))
            self._unknown |= value.dtype != whole.dtype
        else:
            self._unknown = True

    def _is_given(self, tensor: torch.Tensor) -> bool:
        """Whether it is the current tensor, or a view of it (which may reach beyond it, if it shares a buffer)."""
        return (
            self._current is not None
            and self._current[1].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        )


class DirectLoader:
    """Loads weights into a vLLM worker's model: the first time with vLLM's loader, then by the copies it made.

    Where that loader does more than to copy, or kernels need another order of experts or matrices made of latent
    attention's projections, vLLM does it each time, which is slower.
    """

    def __init__(self) -> None:
        self._watch: WatchedLoad | None = None

    def load(self, worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load `weights`, whose names, shapes and strides are the same every time."""
        model = worker.model_runner.model
        if any(hasattr(layer, name) for layer in model.modules() for name in ("w13_weight", "kv_b_proj")):
            worker.reload_weights(weights_iterator=iter(weights))
        elif self._watch is None:
            self._watch = load_watched(model, weights)
        elif self._watch.is_complete:
            copy_again(self._watch, weights)
        else:
            model.load_weights(iter(weights))


def load_watched(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> WatchedLoad:
    """Load weights with the model's own loader; returns what it did."""
    watch = WatchedLoad(model)
    with watch:
        model.load_weights(watch.remember(weights))
    if not watch.is_complete:
        logger.info("vLLM loads the weights of every update: its loader does not just copy them to all parameters")
    return watch


def copy_again(watch: WatchedLoad, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Do with new weights what was done with those that a complete `watch` has seen."""
    loaded = 0
    for name, tensor in weights:
        assert _form(tensor) == watch.given[name], f"{name} has changed"
        for copy in watch.copies[name]:
            copy.target.copy_(tensor.as_strided(copy.shape, copy.strides, tensor.storage_offset() + copy.offset))
        loaded += 1
    assert loaded == len(watch.given), f"{loaded} tensors were given, {len(watch.given)} the first time"
    for target, value in watch.constants:  # memory that was given back meanwhile has lost them, too
        target.fill_(value)
