"""A critic of its own: values and gradient against Hugging Face's sequence classification with one label, float64."""

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from transformers import AutoConfig, AutoModelForSequenceClassification

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.types import RolloutBatch

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP2": (2, {}),
}
SEQUENCES = 4


def make_batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        [torch.randint(1, 16, (length,), generator=generator) for length in lengths]
        for lengths in ((3, 1, 5, 2), (4, 6, 1, 3))
    )
    return RolloutBatch(
        prompts, responses, {"returns": [torch.randn(len(r), generator=generator) for r in responses]}
    )


def train(rank: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Values as the folder has them, and the gradient of their squared errors."""
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.critic import CriticEngine
    from mindspeed_rl.engine.megatron.engine import initialize_parallel_state
    from mindspeed_rl.engine.megatron.model import named_parameters

    cfg = MegatronConfig(lr=1e-3, clip_grad=0.0, use_distributed_optimizer=False, **settings)
    weights, model = HFWeights(f"{folder}/critic"), ModelConfig.from_hf(HFWeights(f"{folder}/language").config())
    initialize_parallel_state(cfg)
    engine = CriticEngine(cfg, model, device, 10, weights)
    share = SEQUENCES // engine.data_parallel_size
    mine = make_batch().select(range(SEQUENCES)[engine.data_parallel_rank * share :][:share])
    passes = [[index] for index in range(share)]
    tokens = float(make_batch().response_lengths.sum())

    def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
        assert outputs.values is not None
        return ((outputs.values - torch.cat(micro.columns["returns"])) ** 2).sum() / tokens, MetricSet()

    values = engine.score(mine, passes, 1.0)
    engine.train_mini_batch(mine, loss, passes, 1.0, entropy=False)
    gradients = {
        name: parameter.main_grad.clone()
        for name, parameter in named_parameters(
            [chunk.module for chunk in engine.actor], engine.model_config, engine.layout
        )
    }
    return {
        "values": (engine.data_parallel_rank, values.values) if values else None,
        "gradient": gradients.get("value_head.weight"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("model")
    config = AutoConfig.from_pretrained(make_tiny_model(root / "language"))
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "critic")
    return str(root)


def reference(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of all response tokens, and the head's gradient."""
    model, batch = AutoModelForSequenceClassification.from_pretrained(f"{folder}/critic").double(), make_batch()
    values = []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state[0]
        values.append(model.score(hidden)[len(prompt) - 1 : -1, 0])
    found, returns = torch.cat(values), torch.cat(batch.columns["returns"]).double()
    ((found - returns) ** 2).mean().backward()
    return found.detach(), model.score.weight.grad


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradient_are_those_of_the_folder(name: str, folder: str) -> None:
    world, settings = LAYOUTS[name]
    results, (values, gradient) = run_ranks(world, train, folder, settings), reference(folder)
    found = dict(result["values"] for result in results if result["values"])
    torch.testing.assert_close(
        torch.cat([found[rank] for rank in sorted(found)]).double(), values, atol=2e-6, rtol=1e-5
    )
    assert values.abs().max() > 0.01
    for result in results:
        if result["gradient"] is not None:
            torch.testing.assert_close(result["gradient"].double(), gradient, atol=2e-6, rtol=1e-5)
