"""Weights copied to where vLLM's loader has put the first ones: the bits that the loader gives, padding included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import make_family
from support.ranks import run_ranks

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.device.cpu import CpuDevice


def copies(rank: int, folder: str, infer_tp: int) -> None:
    from mindspeed_rl.engine.vllm.engine import VllmEngine

    cfg = GenerateConfig(infer_tensor_parallel_size=infer_tp, dtype="bfloat16", max_model_len=64)
    engine = VllmEngine(cfg, folder, CpuDevice(), 1, [0])
    engine.llm.collective_rpc(compare, args=(folder,))


def compare(worker: Any, folder: str) -> None:
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mindspeed_rl.engine.vllm.direct_load import copy_again, load_watched

    def new_model() -> Any:
        """As CUDA has it: nothing is packed after loading."""
        worker.vllm_config.compilation_config.static_forward_context.clear()
        with torch.no_grad(), set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=worker.vllm_config)
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        return model

    stored = HFWeights(folder)

    def weights(factor: float) -> Any:
        """As resharding gives them: some are views of one buffer, which others take after them; others strided."""
        buffer = torch.empty(2, 1 << 16)
        for number, name in enumerate(stored.names):
            tensor = factor * stored.tensor(name)
            view = buffer[number % 2, 5 : 5 + tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    def parameters(model: Any) -> dict[str, torch.Tensor]:
        return {name: parameter.view(torch.int16) for name, parameter in model.named_parameters()}

    with torch.no_grad():
        fresh, model = new_model(), new_model()
        fresh.load_weights(weights(3.0))
        watch = load_watched(model, weights(1.0))
        assert watch.is_complete
        assert len(watch.given) == len(stored.names)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # vLLM has slept
        copy_again(watch, weights(3.0))
        for name, expected in parameters(fresh).items():
            assert torch.equal(parameters(model)[name], expected), name
        with pytest.raises(AssertionError, match=f"{len(stored.names) - 1} tensors were given"):
            copy_again(watch, list(weights(3.0))[1:])
        name = stored.names[0]
        with pytest.raises(AssertionError, match=f"{name} has changed"):
            copy_again(watch, [(name, stored.tensor(name).T)])

        loaders = [
            lambda parameter, given: parameter.data.copy_(given + 1),
            lambda parameter, given: parameter.data.copy_(given.mul_(2)),
            lambda parameter, given: parameter.data.fill_(given[0].item()),
            lambda parameter, given: parameter.data[1:].copy_(given[1:]),
        ]
        for loader in loaders:
            model = new_model()
            model.model.norm.weight.weight_loader = loader
            assert not load_watched(model, weights(1.0)).is_complete


@pytest.mark.parametrize(("family", "infer_tp"), [("qwen2", 2), ("qwen3", 1)])
def test_copies_repeat_what_the_loader_did(family: str, infer_tp: int, tmp_path: Path) -> None:
    run_ranks(infer_tp, copies, str(make_family(tmp_path / family, family)), infer_tp)
