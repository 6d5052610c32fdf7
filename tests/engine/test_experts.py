"""Experts in the training engine: against transformers, and every layout against one rank, in float32."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.reference import hf_log_probs, of_responses
from test_training_layouts import (
    CAP,
    LOG_PROB_TOLERANCE,
    LOSS_TOLERANCE,
    PP,
    RING,
    SEQUENCES,
    TEMPERATURE,
    TP,
    VPP,
    Layout,
    Micro,
    assert_trained_the_same,
    gather,
    layout,
    make_batch,
    merged,
    objective_loss,
    textbook_loss,
    train,
)
from transformers import AutoModelForCausalLM

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.resharding.names import Parameter, parameter_table
from mindspeed_rl.types import Denominators

EP = "expert_model_parallel_size"
WEIGHT_TOLERANCE = 2e-5  # of two layers: a hundredth of two Adam steps of 1e-3
CLIP = {"clip_grad": 0.05}  # below the norm: the step depends on it
LAYOUTS = [
    layout(2, 3, **{EP: 2}, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    layout(2, max_tokens=CAP, **{EP: 2}, use_distributed_optimizer=False),
    layout(4, **{EP: 2}),
    layout(2, 3, **{TP: 2}, sequence_parallel=True),
    layout(4, 3, **{EP: 2, TP: 2}, sequence_parallel=True),
    layout(4, 3, **{EP: 2, PP: 2}),
    layout(2, 3, context_parallel_size=2, **{EP: 2}),
    layout(4, 3, context_parallel_size=2, **{EP: 4}, **RING),
    layout(4, max_tokens=CAP, context_parallel_size=2, **{EP: 2}, use_distributed_optimizer=False),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "experts", "qwen3_moe", hidden=64, tie=True))


@pytest.fixture(scope="module")
def one_rank(folder: str) -> list[dict[str, Any]]:
    return run_ranks(1, train, folder, CLIP, Micro(SEQUENCES), 2)


@pytest.mark.parametrize(
    "further",
    [{}, {"norm_topk_prob": False}, {"layers": 3, "mlp_only_layers": [1], "experts_per_token": 3}],
    ids=["all layers", "weights not normed", "a dense layer"],
)
def test_log_probs_equal_those_of_transformers(further: dict[str, Any], tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path / "model", "qwen3_moe", **further))
    result = run_ranks(1, train, folder, {}, Micro(3), 0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = of_responses(hf_log_probs(model, make_batch(), TEMPERATURE), make_batch())
    torch.testing.assert_close(gather(result, "log_probs"), expected, atol=LOG_PROB_TOLERANCE, rtol=0)


def table_of(folder: str) -> list[Parameter]:
    with open(f"{folder}/config.json") as file:
        return parameter_table(ModelConfig.from_hf(json.load(file)))


def stored_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients under the names of a checkpoint: transformers computes with fused experts."""
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        prefix, _, fused = name.partition(".experts.")
        for expert, gradient in enumerate(parameter.grad if fused else []):
            kinds = dict(zip(("gate", "up"), gradient.chunk(2), strict=True))
            for kind, value in (kinds if fused == "gate_up_proj" else {"down": gradient}).items():
                gradients[f"{prefix}.experts.{expert}.{kind}_proj.weight"] = value
        gradients[name] = parameter.grad
    return gradients


def assert_textbook_gradients(folder: str, one_rank: list[dict[str, Any]], trained: Iterable[Parameter]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    loss = textbook_loss(model)
    loss.backward()
    expected = stored_gradients(model)
    norm = torch.cat([gradient.flatten().double() for gradient in expected.values() if gradient.dim() < 3]).norm()
    found = merged(one_rank, 0)
    assert found["actor/loss"] == pytest.approx(loss.item(), abs=LOSS_TOLERANCE)
    assert found["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    scale = CLIP["clip_grad"] / norm
    assert scale < 1
    for parameter in trained:
        gradient = parameter.from_hf([expected[name] for name in parameter.hf_names])
        torch.testing.assert_close(one_rank[0]["gradients"][parameter.name], gradient * scale, atol=1e-6, rtol=1e-4)


def test_gradient_equals_autograd_of_the_textbook_loss(folder: str, one_rank: list[dict[str, Any]]) -> None:
    assert_textbook_gradients(folder, one_rank, table_of(folder))


def assert_agrees(case: Layout, folder: str, one_rank: list[dict[str, Any]]) -> None:
    results = run_ranks(case.world, train, folder, {**CLIP, **case.settings}, case.micro, 2)
    stored = HFWeights(folder)
    for result in results:
        assert sorted(result["loaded"]) == sorted(stored.names)
        assert all(torch.equal(tensor, stored.tensor(name)) for name, tensor in result["loaded"].items())
    assert_trained_the_same(results, one_rank, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_layouts_agree_with_one_rank(case: Layout, folder: str, one_rank: list[dict[str, Any]]) -> None:
    assert_agrees(case, folder, one_rank)


def test_chunks_have_experts_where_their_layers_do(tmp_path: Path) -> None:
    """Layers 0 and 2 are the chunks of the first stage, 1 and 3 of the second."""
    folder = str(make_tiny_model(tmp_path / "model", "qwen3_moe", hidden=64, layers=4, mlp_only_layers=[2]))
    one_rank = run_ranks(1, train, folder, CLIP, Micro(SEQUENCES), 2)
    assert_agrees(layout(4, **{EP: 2, PP: 2, VPP: 1}), folder, one_rank)


def test_every_expert_is_trained(folder: str, one_rank: list[dict[str, Any]]) -> None:
    """So that a layout in which some expert got no gradient could not agree by chance."""
    changed = [
        not torch.equal(one_rank[0]["weights"][parameter.hf_names[0]], one_rank[0]["loaded"][parameter.hf_names[0]])
        for parameter in table_of(folder)
        if parameter.expert is not None
    ]
    assert len(changed) == 2 * 8 * 2
    assert all(changed)


def train_both_ways(rank: int, folder: str) -> None:
    """Grouped products against Megatron's loop over experts, which devices without such products run."""
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from megatron.core.transformer.moe.experts import SequentialMLP

    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state
    from mindspeed_rl.engine.megatron.experts import GroupedExperts

    cfg = MegatronConfig(lr=1e-3)
    initialize_parallel_state(cfg)
    batch, weights = make_batch(), HFWeights(folder)
    loss = objective_loss(PolicyObjective(RLConfig(entropy_coeff=0.01)), Denominators(20, SEQUENCES))
    results = []
    for groups, kind in ((True, GroupedExperts), (False, SequentialMLP)):
        device.groups_matmuls = groups
        engine = MegatronEngine(cfg, ModelConfig.from_hf(weights.config()), device, 10, weights, False)
        (chunk,) = engine.actor
        assert {type(layer.mlp.experts) for layer in chunk.module.decoder.layers} == {kind}
        log_probs = engine.score(batch, [[0, 1, 2], [3, 4, 5, 6, 7]], 1.0).log_probs
        engine.train_mini_batch(batch, loss, [[0, 1, 2], [3, 4, 5, 6, 7]], 1.0, entropy=True)
        results.append((log_probs, {name: p.main_grad.clone() for name, p in chunk.module.named_parameters()}))
    (log_probs, gradients), (expected_log_probs, expected_gradients) = results
    torch.testing.assert_close(log_probs, expected_log_probs, atol=LOG_PROB_TOLERANCE, rtol=0)
    for name, expected in expected_gradients.items():
        torch.testing.assert_close(gradients[name], expected, atol=1e-6, rtol=1e-4)


def test_grouped_experts_equal_the_loop_over_them(folder: str) -> None:
    run_ranks(1, train_both_ways, folder)
