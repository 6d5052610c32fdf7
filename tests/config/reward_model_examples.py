"""Examples that break the rules on reward models, as in `test_rules.py`."""

import json
from pathlib import Path
from typing import Any

LOAD = "reward_config.load=reward"  # made by conftest.py
ALONE = [
    LOAD, "rl_config.rule_reward=false", "rl_config.verifier_function=[]", "rl_config.verifier_weight=[]",
    "~rl_config.verifier_parallel",
]  # fmt: skip
SHAPE = {  # for a TP of 4
    "architectures": ["Qwen2ForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}


def write_shape(folder: Path, **changes: Any) -> None:
    """A reward model's config.json and a sign of a tokenizer, without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, **changes}))
    (folder / "tokenizer_config.json").write_text("{}")


# rule -> (overrides, key path, value, part of the message, part of the suggestion)
REWARD_MODEL_EXAMPLES = {
    "reward_model_is_known": (
        ["reward_config.load=two_labels"],
        "reward_config.load", "two_labels", "num_labels = 2", "",
    ),
    "reward_model_keys_are_used": (
        ["reward_config.max_length=100"],
        "reward_config.max_length", 100, "there is no reward model", "set reward_config.load",
    ),
    "something_scores_responses": (
        ["rl_config.rule_reward=false"],
        "rl_config.rule_reward", False, "leaves nothing that scores", "reward_config.load",
    ),
    "verifier_keys_are_used": (
        [LOAD, "rl_config.rule_reward=false"],
        "rl_config.verifier_function", ["math_verify"], "rule_reward = False", "to []",
    ),
    "greedy_responses_have_rewards": (
        [LOAD, "rl_config.adv_estimator=remax"],
        "rl_config.adv_estimator", "remax", "greedy responses", "another adv_estimator",
    ),
    "validation_has_verifiers": (
        [*ALONE, "megatron_training.val_data_path=val.jsonl", "rl_config.test_freq=5"],
        "megatron_training.val_data_path", "val.jsonl", "scored by verifiers", "with the weight 0",
    ),
    "reward_model_fits_layout": (
        [LOAD, "actor_config.tensor_model_parallel_size=1", "actor_config.pipeline_model_parallel_size=4",
         "megatron_training.sequence_parallel=false", "megatron_training.recompute_num_layers=7"],
        "actor_config.pipeline_model_parallel_size", 4, "the reward model's num_layers = 6", "possible: 2, 3, 6",
    ),
    "reward_model_is_not_interleaved": (
        [LOAD, "actor_config.tensor_model_parallel_size=1", "actor_config.pipeline_model_parallel_size=2",
         "actor_config.num_layers_per_virtual_pipeline_stage=7", "megatron_training.sequence_parallel=false",
         "megatron_training.recompute_num_layers=7"],
        "actor_config.num_layers_per_virtual_pipeline_stage", 7, "cannot be interleaved", "remove it",
    ),
    "reward_model_makes_equal_passes": (
        [LOAD, "actor_config.expert_model_parallel_size=2", "rl_config.filter_groups_enable=true"],
        "rl_config.filter_groups_enable", True, "expert_model_parallel_size = 2", "set it to false",
    ),
    "reward_model_has_positions": (
        [LOAD, "reward_config.max_length=4097"],
        "reward_config.max_length", 4097, "the 4096 tokens", "at most 4096",
    ),
    "packing_size_holds_a_rewarded_sequence": (
        [LOAD, "rl_config.use_dynamic_bsz=true", "rl_config.max_packing_token_size=4096",
         "~actor_config.micro_batch_size", "~rl_config.actor_forward_micro_batch_size",
         "~rl_config.ref_forward_micro_batch_size", "reward_config.max_length=4096"],
        "reward_config.max_length", 4096, "max_packing_token_size = 4096", "at most 4095",
    ),
}  # fmt: skip
