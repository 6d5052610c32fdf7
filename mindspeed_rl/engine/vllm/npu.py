"""vLLM-Ascend: what its engine is told; new weights for experts, which it keeps transposed, and latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.generate import GenerateConfig

# of its `additional_config`, by our key: the section to switch on, and the class that reads it where there is one
_SECTIONS = {
    "torchair_graph": ("torchair_graph_config", "TorchairGraphConfig"),
    "ascend_scheduler": ("ascend_scheduler_config", "AscendSchedulerConfig"),
}


def arguments(cfg: GenerateConfig) -> dict[str, Any]:
    """Of the engine.

    Raises:
        ConfigError: the installed version no longer has what is asked for, and would silently do without.
    """
    wanted = {key: names for key, names in _SECTIONS.items() if getattr(cfg, key)}
    if not wanted:
        return {}
    from vllm_ascend import ascend_config

    message, hint = "the installed vLLM-Ascend has it no longer; 0.11 does", "set it to false"
    gone = [key for key, (_, reader) in wanted.items() if not hasattr(ascend_config, reader)]
    if gone:
        raise ConfigError([Violation(f"generate_config.{key}", True, message, hint) for key in gone])
    return {"additional_config": {section: {"enabled": True} for section, _ in wanted.values()}}


@contextmanager
def experts_as_loaded(model: torch.nn.Module) -> Iterator[None]:
    """Inside, weights of experts can be loaded in place; before and after, the kernels find what they need.

    After loading, vLLM-Ascend (0.11 and later) turns a layer's experts from [experts, rows, columns] into [experts,
    columns, rows], in new parameters that know no loader. Some of its versions turn them back when woken up. Here
    loaders get transposed views of the same memory.
    """
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "w13_weight")]
    for_kernels = [
        (layer, name, _for_kernels(layer, name)) for layer in layers for name in ("w13_weight", "w2_weight")
    ]
    for layer, name, weight in for_kernels:
        view = torch.nn.Parameter(weight.data.transpose(1, 2), requires_grad=False)
        view.weight_loader = layer.weight_loader  # type: ignore[attr-defined]
        setattr(layer, name, view)
    try:
        yield
    finally:
        for layer, name, weight in for_kernels:
            setattr(layer, name, weight)


def _for_kernels(layer: Any, name: str) -> torch.nn.Parameter:
    """w13 as [experts, hidden, 2 x width], w2 as [experts, width, hidden]."""
    # one of the two matrices may be square: both tell
    is_turned_back = layer.w13_weight.shape[2] == layer.hidden_size == layer.w2_weight.shape[1]
    weight = getattr(layer, name)
    return torch.nn.Parameter(weight.data.transpose(1, 2), requires_grad=False) if is_turned_back else weight


def load_weights(worker: Any, weights: Any) -> None:
    """Load weights into a model that has been loaded before."""
    model = worker.model_runner.model
    with experts_as_loaded(model):
        model.load_weights(weights)
    for layer in model.modules():
        if hasattr(getattr(layer, "impl", None), "kv_b_proj"):
            # latent attention computes with matrices that it makes of this projection after loading
            layer.process_weights_after_loading(worker.model_config.dtype)
