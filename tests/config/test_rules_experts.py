"""Rules on mixtures of experts, beyond one example each."""

import pytest
from expert_examples import EXPERTS
from test_rules import BASE, violations_of

from mindspeed_rl.config.compose import load_config

LARGE = "grpo_trainer_deepseekv3_671b"


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_config.expert_model_parallel_size=2"],
        ["actor_config.expert_model_parallel_size=2", "actor_config.context_parallel_size=2"],
        ["model.qwen3_30b_a3b.ffn_hidden_size=6145"],  # no layer has an MLP of this width
        ["~generate_config.infer_expert_parallel_size", "generate_config.enable_expert_parallel=true"],
        ["generate_config.infer_expert_parallel_size=4", "generate_config.enable_expert_parallel=true"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_allowed(overrides):
    load_config(BASE, [*EXPERTS, *overrides])


def test_every_violation_about_experts_is_reported_at_once():
    found = violations_of(
        "actor_config.expert_model_parallel_size=3",
        "generate_config.infer_expert_parallel_size=8",
        "actor_config.sequence_parallel=false",
        *EXPERTS,
    )
    assert [(v.path, v.value) for v in found] == [
        ("actor_config.expert_model_parallel_size", 3),  # of 128 experts
        ("actor_config.expert_model_parallel_size", 3),  # of 2 data-parallel ranks
        ("actor_config.sequence_parallel", False),
        ("generate_config.infer_expert_parallel_size", 8),
    ]


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["generate_config.infer_expert_parallel_size=4"], "infer_expert_parallel_size", "enable_expert_parallel"),
        (
            ["generate_config.enable_expert_parallel=true", "generate_config.infer_tensor_parallel_size=1"],
            "enable_expert_parallel",
            "engines of one device",
        ),
        (["model.qwen3_30b_a3b.moe_ffn_hidden_size=770"], "infer_tensor_parallel_size", "moe_ffn_hidden_size = 770"),
    ],
)
def test_experts_in_rollout(overrides, path, message):
    found = violations_of(*EXPERTS, *overrides)
    (violation,) = [v for v in found if v.path == f"generate_config.{path}"]
    assert message in str(violation)


def test_a_dense_model_has_no_expert_parallel_ranks():
    (violation,) = violations_of("actor_config.expert_model_parallel_size=2")
    assert "a Qwen2ForCausalLM has no experts" in violation.message


def test_shared_experts_are_divided_by_tensor_parallelism_also_beside_whole_experts():
    found = violations_of("model.deepseekv3_671b.moe_shared_expert_intermediate_size=2052", name=LARGE)
    assert [(v.path, v.value) for v in found] == [
        ("actor_config.tensor_model_parallel_size", 8),
        ("generate_config.infer_tensor_parallel_size", 32),
    ]
    assert all("moe_shared_expert_intermediate_size = 2052" in v.message for v in found)


def test_recomputed_layers_are_those_of_the_largest_stage():
    (violation,) = violations_of("megatron_training.recompute_num_layers=5", name=LARGE)
    assert "only 4 of the model's 61 layers" in violation.message
