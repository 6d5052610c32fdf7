"""DeepSeek-V3 in the training engine: gradients of transformers, layouts against one rank, the experts' bias."""

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from test_experts import CLIP, EP, assert_agrees, assert_textbook_gradients, table_of
from test_training_layouts import (
    PP,
    RING,
    SEQUENCES,
    TP,
    Layout,
    Micro,
    layout,
    train,
)

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.checkpoint.hf import HFWeights

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = [
    layout(4, 3, **{EP: 2, TP: 2}, **OVERLAP, sequence_parallel=True, recompute_granularity="selective"),
    layout(4, 3, **{PP: 2, EP: 2}, num_layer_list="1,2", context_parallel_size=2, use_distributed_optimizer=False),
    layout(3, 3, context_parallel_size=3, **RING),
]
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "latent", "deepseek_v3", hidden=64, layers=3))


@pytest.fixture(scope="module")
def one_rank(folder: str) -> list[dict[str, Any]]:
    return run_ranks(1, train, folder, CLIP, Micro(SEQUENCES), 2)


def test_gradient_equals_autograd_of_the_textbook_loss(folder: str, one_rank: list[dict[str, Any]]) -> None:
    trained = [parameter for parameter in table_of(folder) if not parameter.name.endswith("expert_bias")]
    assert len(one_rank[0]["gradients"]) == len(trained) == len(table_of(folder)) - 2
    assert_textbook_gradients(folder, one_rank, trained)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_layouts_agree_with_one_rank(case: Layout, folder: str, one_rank: list[dict[str, Any]]) -> None:
    assert_agrees(case, folder, one_rank)


def test_training_leaves_the_bias_of_experts_as_it_is(folder: str, one_rank: list[dict[str, Any]]) -> None:
    stored, trained = HFWeights(folder), one_rank[0]["weights"]
    biases = [name for name in stored.names if name.endswith(BIAS)]
    assert len(biases) == 2
    for name in biases:
        assert stored.tensor(name).abs().max() > 0.05  # as large as scores differ: it decides
        assert torch.equal(trained[name], stored.tensor(name))
    others = [name for name in stored.names if name not in biases]
    assert not any(torch.equal(trained[name], stored.tensor(name)) for name in others)
