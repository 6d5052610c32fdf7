"""Reward models in the configuration: what may be combined, whose shape counts, what it takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from reward_model_examples import ALONE, LOAD, SHAPE, write_shape
from violations import BASE, DYNAMIC, SEPARATE, violations_of

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model, resolve_reward_model
from mindspeed_rl.config.layout import (
    derive_layout,
    in_place_of_actor,
    scored_stages,
    scores_before_rewards,
    stages_beside_rewards,
    stages_beside_rollout,
)
from mindspeed_rl.config.memory import pass_bytes
from mindspeed_rl.config.model import CriticModel
from mindspeed_rl.config.rules_memory import estimate

SOURCES = "rl_config.source_verifier_weight"
SIZES = ["reward_config.micro_batch_size=2", "reward_config.max_length=1000"]
STAYS = "generate_config.offload_reward_model=false"


@pytest.mark.parametrize(
    "overrides",
    [
        [LOAD],
        ALONE,
        [LOAD, "rl_config.reward_model_weight=0.0"],  # beside verifiers, for metrics alone
        [LOAD, "rl_config.source_verifier_weight={code: {reward_model: 1.0}, math: {math_verify: 1.0}}"],
        [LOAD, "rl_config.filter_groups_enable=true", "rl_config.filter_groups_metric=reward_model"],
        [LOAD, *SEPARATE],
        [LOAD, *DYNAMIC, "reward_config.max_length=4096"],
        [LOAD, "reward_config.truncation=left", "generate_config.offload_reward_model=true"],
        [LOAD, "megatron_training.val_data_path=val.jsonl", "rl_config.test_freq=5"],
    ],
)
def test_what_goes_together(overrides: list[str]) -> None:
    load_config(BASE, overrides)


def test_the_shipped_configuration_scores_with_a_model_alone() -> None:
    cfg, _ = load_config("grpo_trainer_tiny_cpu_reward_model")
    assert cfg.rl_config.verifiers == {}
    assert scored_stages(cfg) == ("reward_model",)


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        (
            ["rl_config.reward_model_weight=2", "reward_config.truncation=left",
             "generate_config.offload_reward_model=true"],
            ["generate_config.offload_reward_model", "reward_config.truncation", "rl_config.reward_model_weight"],
        ),
        ([*ALONE, "rl_config.reward_model_weight=0"], ["rl_config.reward_model_weight"]),
        ([*ALONE, "rl_config.verifier_timeout=3"], ["rl_config.verifier_timeout"]),
        (
            [*ALONE, "rl_config.custom_reward_function={path: mine.py}"],
            ["rl_config.custom_reward_function", "rl_config.custom_reward_function"],
        ),
        ([f"{SOURCES}={{code: {{reward_model: 1}}}}"], [f"{SOURCES}.code.reward_model"]),
        (
            [LOAD, "megatron_training.val_data_path=v", "rl_config.test_freq=1",
             f"{SOURCES}={{code: {{reward_model: 1}}}}"],
            [f"{SOURCES}.code"],
        ),
        (
            ["rl_config.filter_groups_enable=true", "rl_config.filter_groups_metric=reward_model"],
            ["rl_config.filter_groups_metric"],
        ),
        ([LOAD, *DYNAMIC], ["reward_config.max_length"]),
        (
            [LOAD, *DYNAMIC, "reward_config.max_length=9", "reward_config.micro_batch_size=2"],
            ["reward_config.micro_batch_size"],
        ),
        ([LOAD, *SEPARATE, "generate_config.offload_reward_model=true"], ["generate_config.offload_reward_model"]),
        ([LOAD, "reward_config.truncation=error"], ["reward_config.truncation"]),
    ],
)  # fmt: skip
def test_what_does_not(overrides: list[str], paths: list[str]) -> None:
    assert [violation.path for violation in violations_of(*overrides)] == paths


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "is no …ForSequenceClassification"),
        ({"architectures": ["BertForSequenceClassification"]}, "is not supported"),
        ({"id2label": {"0": "bad", "1": "good"}}, "num_labels = 2"),
        ({"num_labels": 3}, "num_labels = 3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_models_that_give_no_reward(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_shape(tmp_path / "reward", **changes)
    (violation,) = violations_of(LOAD)
    assert (violation.path, violation.value) == ("reward_config.load", "reward")
    assert message in violation.message


def test_its_shape_is_its_own_and_the_layout_the_actors(tmp_path: Path) -> None:
    cfg, _ = load_config(BASE, [LOAD])
    assert resolve_reward_model(cfg) == CriticModel.from_hf(SHAPE)
    write_shape(tmp_path / "reward", num_attention_heads=6, num_key_value_heads=2)
    found = violations_of(LOAD)
    assert {violation.path for violation in found} == {"actor_config.tensor_model_parallel_size"}
    assert [violation.message.partition(" = ")[0] for violation in found] == [
        "does not divide the reward model's num_attention_heads",
        "does not divide the reward model's num_query_groups",
    ]


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = [violation.message for violation in violations_of("reward_config.load=empty")]
    assert [message.partition(":")[0] for message in found] == [
        "holds neither tokenizer.json nor tokenizer_config.json",
        "holds no config.json",
    ]


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    from mindspeed_rl.config.files import missing_files

    keys = ("load", "tokenizer_name_or_path", "chat_template")
    cfg, _ = load_config(BASE, [f"reward_config.{key}=none" for key in keys])
    missing = {violation.path: violation.message for violation in missing_files(cfg)}
    found = {key: missing[f"reward_config.{key}"].partition(" (")[0] for key in keys}
    assert found == {
        "load": "no such folder",
        "tokenizer_name_or_path": "no such folder",
        "chat_template": "no such file",
    }


@pytest.mark.parametrize(
    ("overrides", "apart", "beside_rollout"),
    [
        ([STAYS], False, True),
        (["generate_config.offload_reward_model=true"], False, False),
        ([STAYS, "rl_config.blocking=true"], True, False),
        ([STAYS, "rl_config.filter_groups_enable=true"], True, False),
    ],
)
def test_its_stage_comes_before_rewards_are_waited_for(
    overrides: list[str], apart: bool, beside_rollout: bool
) -> None:
    cfg, _ = load_config(BASE, [LOAD, *overrides])
    assert scored_stages(cfg)[:2] == ("reward_model", "reference")
    assert scores_before_rewards(cfg) == apart
    assert ("reward_model" in stages_beside_rewards(cfg)) != apart
    assert ("reward_model" in stages_beside_rollout(cfg, derive_layout(cfg))) == beside_rollout


def test_memory_that_it_takes(tmp_path: Path) -> None:
    """Worked out by hand: a bf16 model on 4 tensor-parallel ranks, where it is and where it is not needed."""
    whole, without = load_config(BASE, [LOAD, STAYS])[0], load_config(BASE)[0]
    memory, less = estimate(whole, resolve_model(whole)), estimate(without, resolve_model(without))
    attention = 4 * 64 * 64 + 3 * 64  # with biases of queries, keys, values
    parameters = 6 * (attention + 3 * 64 * 128 + 2 * 64) + 100 * 64 + 64 + 64  # embedding, last norm, head
    assert memory.reward_model == pytest.approx(parameters * 2 / 4, rel=0.01)
    assert less.reward_model == 0
    assert memory.training_kept - less.training_kept == memory.reward_model
    away = load_config(BASE, [LOAD, "generate_config.offload_reward_model=true"])[0]
    assert estimate(away, resolve_model(away)).training_kept == less.training_kept
    # 2 sequences of 1000 tokens: residual, norm and product of 8192, gate, up and product of 4 x 65536 / TP
    write_shape(tmp_path / "reward", hidden_size=8192, intermediate_size=4 * 65536, num_attention_heads=4)
    wide, _ = load_config(BASE, [LOAD, *SIZES])
    shape = resolve_reward_model(wide)
    assert shape is not None
    found = pass_bytes(in_place_of_actor(wide), shape, derive_layout(wide), "reward_model")
    assert found == pytest.approx(2 * 1000 * (3 * 8192 / 4 + 8192 + 3 * 65536) * 2)
    away, _ = load_config(BASE, [LOAD, "generate_config.offload_reward_model=true", *SIZES])
    memory = estimate(away, resolve_model(away))
    assert memory.scoring == memory.reward_model + found  # both come for the stage


def test_a_plan_counts_it(tmp_path: Path) -> None:
    """So wide a model that it alone is too much; on the host while others work, it comes for its stage only."""
    write_shape(tmp_path / "reward", hidden_size=8192, intermediate_size=65536, num_hidden_layers=40)
    found = [str(v) for v in violations_of(LOAD, "device_memory_gib=60")]
    assert all("device_memory_gib" in violation for violation in found)
    assert any("reward model" in violation for violation in found)
    assert any("generate_config.offload_reward_model: true" in violation for violation in found)


def test_shapes_are_json(tmp_path: Path) -> None:
    (tmp_path / "reward" / "config.json").write_text(json.dumps([1]))
    assert "holds a list, not an object" in violations_of(LOAD)[0].message
