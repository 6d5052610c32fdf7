"""Whether a running vLLM model has the weights that a new one would have."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from mindspeed_rl.engine.vllm import npu
from mindspeed_rl.engine.vllm.versions import default_dtype
from mindspeed_rl.resharding.checksums import BITS

PROBES = 256  # rows of the identity at a time: bounds the memory of what is read out


def differing_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the running model's weights whose bits are not those of a new model that loads `weights`.

    Compared are all parameters as kernels find them, and what the CPU's linear layers keep packed.
    """
    live, new = worker.model_runner.get_model(), _new_model(worker, weights)
    # vLLM-Ascend may have turned the experts of one and not of the other: they are compared as loaders see them
    same_order: Any = npu.experts_as_loaded if worker.device.type == "npu" else nullcontext
    with same_order(live), same_order(new):
        expected, found = dict(_parameters(new)), dict(_parameters(live))
        wrong = [
            name for name in expected.keys() | found.keys() if not _same_bits(expected.get(name), found.get(name))
        ]
    packed = dict(_packed_layers(new))
    wrong += [
        f"{name} (packed)"
        for name, layer in _packed_layers(live)
        if not all(map(_same_bits, _multipliers(layer), _multipliers(packed[name])))
    ]
    return sorted(wrong)


def _new_model(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """Another instance of the worker's model, which loads `weights` for the first time."""
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    config = copy.copy(worker.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    # layers enter themselves there by name, and may do so once
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []  # since 0.12; before, nothing reads it
    device = torch.device(worker.device)
    with torch.no_grad(), default_dtype(config.model_config.dtype), device:
        model: Any = initialize_model(vllm_config=config)
        model.load_weights(iter(weights))
        process_weights_after_loading(model, config.model_config, device)
    return model


def _same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = BITS[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by name, without the rows that pad the vocabulary: nothing ever reads what is in them."""
    rows = {f"{name}.weight": _vocabulary(module) for name, module in model.named_modules()}
    return ((name, parameter.data[: rows.get(name)]) for name, parameter in model.named_parameters())


def _vocabulary(module: Any) -> int | None:
    """How many rows of an embedding or output layer are tokens; None for other layers."""
    indices = getattr(module, "shard_indices", None)
    return indices.num_org_elements if indices is not None else None


def _packed_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers that have handed their weights to a library, which keeps them in its own order."""
    return ((name, layer) for name, layer in model.named_modules() if hasattr(layer, "cpu_linear"))


def _multipliers(layer: Any) -> Iterator[torch.Tensor]:
    """The weights that a layer multiplies with, [PROBES, output size] at a time, read out by its own kernel.

    A row of the identity times the weights is one of their columns, exactly: the other products are zeros.
    """
    size = next(
        getattr(layer, name)
        for name in ("input_size_per_partition", "input_size", "embedding_dim")
        if hasattr(layer, name)
    )
    for first in range(0, size, PROBES):
        probe = torch.zeros(min(PROBES, size - first), size, dtype=layer.weight.dtype)
        probe[torch.arange(len(probe)), torch.arange(first, first + len(probe))] = 1
        yield layer.cpu_linear(probe, layer.weight, None)[:, : _vocabulary(layer)]
