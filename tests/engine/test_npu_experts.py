"""Weights as vLLM-Ascend keeps them, with layers that follow its published source: no NPU is needed for layouts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.engine.vllm.npu import experts_as_loaded, load_weights


class Experts(torch.nn.Module):
    """Two experts, loaded as vLLM does it and then transposed as vLLM-Ascend does it."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.hidden_size = hidden
        self.w13_weight = self._parameter(torch.zeros(2, 2 * width, hidden))
        self.w2_weight = self._parameter(torch.zeros(2, hidden, width))

    def _parameter(self, data: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(data, requires_grad=False)

    def process_weights_after_loading(self) -> None:
        self.w13_weight = self._parameter(self.w13_weight.data.transpose(1, 2).contiguous())
        self.w2_weight = self._parameter(self.w2_weight.data.transpose(1, 2).contiguous())

    def wake_up(self) -> None:
        self.w13_weight = self._parameter(self.w13_weight.data.transpose(1, 2))
        self.w2_weight = self._parameter(self.w2_weight.data.transpose(1, 2))

    def weight_loader(self, parameter: torch.Tensor, loaded: torch.Tensor, shard: str, expert: int) -> None:
        target = parameter.data[expert]
        half = target.shape[0] // 2
        target = {"w1": target[:half], "w3": target[half:], "w2": target}[shard]
        target.copy_(loaded)


@pytest.mark.parametrize("turned_back", [False, True], ids=["running", "woken up"])
@pytest.mark.parametrize("sizes", [(6, 4), (6, 3), (6, 6)], ids=["plain", "w13 square", "w2 square"])
def test_experts_are_loaded_in_place(sizes: tuple[int, int], turned_back: bool) -> None:
    hidden, width = sizes
    layer = Experts(hidden, width)
    layer.process_weights_after_loading()
    memory = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    if turned_back:
        layer.wake_up()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # the second time after having run
        gate, up = (torch.randn(2, width, hidden, generator=generator) for _ in range(2))
        down = torch.randn(2, hidden, width, generator=generator)
        with experts_as_loaded(model):
            parameters: dict[str, Any] = dict(model.named_parameters())
            for expert in range(2):
                for shard, name, weight in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", down)):
                    parameter = parameters[f"1.{name}_weight"]
                    parameter.weight_loader(parameter, weight[expert], shard, expert)
        assert torch.equal(layer.w13_weight, torch.cat([gate, up], dim=1).transpose(1, 2))
        assert torch.equal(layer.w2_weight, down.transpose(1, 2))
        assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == memory
        assert all(parameter.is_contiguous() for parameter in layer.parameters())


class Attention(torch.nn.Module):
    """With a copy, of another dtype and shape, of a projection that its implementation knows."""

    def __init__(self, projection: torch.nn.Linear):
        super().__init__()
        self.impl = SimpleNamespace(kv_b_proj=projection)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.absorbed = self.impl.kv_b_proj.weight.data.t().to(dtype)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(3, 4, bias=False)
        self.attention = Attention(self.kv_b_proj)
        self.plain = torch.nn.Module()
        self.plain.impl = SimpleNamespace()  # attention without anything to renew

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.load_state_dict(dict(weights))


def test_latent_attention_computes_with_the_new_weights() -> None:
    model = Model()
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(model=model), model_config=SimpleNamespace(dtype=torch.bfloat16)
    )
    for number in (1.0, 2.0):
        load_weights(worker, [("kv_b_proj.weight", torch.full((4, 3), number))])
        assert torch.equal(model.attention.absorbed, torch.full((3, 4), number, dtype=torch.bfloat16))
