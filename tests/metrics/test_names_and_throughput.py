"""The table of names, MindSpeed RL's aliases, and the throughput formulas worked out by hand."""

from typing import get_args

import pytest

from mindspeed_rl.common.metric import Reduction
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.metrics.names import METRICS, describe, with_aliases
from mindspeed_rl.metrics.throughput import (
    model_flops_utilisation,
    stage_seconds,
    step_throughput,
    tokens_per_second_per_device,
    train_flops,
)

# names MindSpeed RL users look for
EXPECTED = {
    "timing/all",
    "timing/rollout",
    "timing/old_log_p",
    "timing/reference_model",
    "timing/update",
    "timing/resharding_to_infer",
    "timing/resharding_to_train",
    "timing/adv",
    "timing/rule_reward",
    "grpo/score/mean",
    "grpo/score/max",
    "grpo/score/min",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "prompt_length/mean",
    "prompt_length/max",
    "prompt_length/min",
    "acc_rewards/mean",
    "strict_format_rewards/mean",
    "e2e_tps",
    "update_tps",
    "vllm_tps",
}

TINY = {
    "architecture": "Qwen2ForCausalLM",
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 3,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def test_all_names_of_mindspeed_rl_are_reported():
    names = [
        name.format(verifier=verifier, source="gsm8k", stage="update", status="timeout", k=1, n=8, response="chosen")
        for name in METRICS
        for verifier in ("acc", "strict_format")
    ]
    reported = with_aliases(dict.fromkeys(names, 1.0))
    assert set(reported) >= EXPECTED
    assert set(names) <= set(reported)


def test_alias_has_the_same_value_and_unknown_names_stay():
    assert with_aliases({"throughput/total": 5.0, "mine": 1.0}) == {
        "throughput/total": 5.0,
        "e2e_tps": 5.0,
        "mine": 1.0,
    }


def test_table_is_complete_and_names_do_not_collide():
    aliases = [info.alias for info in METRICS.values() if info.alias]
    assert len({*aliases, *METRICS}) == len(aliases) + len(METRICS)
    for info in METRICS.values():
        assert info.reduction in get_args(Reduction)
        assert info.meaning
    assert describe("acc_rewards/mean") is METRICS["{verifier}_rewards/mean"]
    assert describe("acc_rewards/timeout") is METRICS["{verifier}_rewards/{status}"]
    assert describe("reward/mean") is METRICS["reward/mean"]
    assert describe("reward/mean2") is None


def test_stage_seconds():
    assert stage_seconds([1.0, 2.0, 6.0], log_max_throughput=False) == 3.0
    assert stage_seconds([1.0, 2.0, 6.0], log_max_throughput=True) == 6.0
    with pytest.raises(ValueError, match="seconds_by_rank is empty"):
        stage_seconds([], True)


def test_step_throughput_by_hand():
    seconds = {"timing/all": 10.0, "timing/update": 4.0, "timing/rollout": 2.0}
    devices = {"all": 4, "update": 1, "rollout": 3}
    assert step_throughput(300, 500, 40, devices, seconds) == {
        "throughput/total": 800 / 40,
        "throughput/update": 800 / 4,
        "throughput/generated": 500 / 6,
        "throughput/longest_sample": 40 / 2,
    }
    assert step_throughput(300, 500, 40, devices, {"timing/all": 10.0}) == {"throughput/total": 20.0}
    for time, count in ((0.0, 1), (1.0, 0)):
        with pytest.raises(ValueError, match="both must be > 0"):
            tokens_per_second_per_device(1, time, count)


@pytest.mark.parametrize("untied", [True, False])
def test_flops_count_every_matrix_product(untied):
    model = ModelConfig(**TINY, untie_embeddings_and_output_weights=untied, add_qkv_bias=False)
    lengths = [5, 9]
    # multiply-adds counted product by product: q, k, v, output, three of the MLP, and the head
    weights = 2 * (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 16) + 50 * 8
    norms = 2 * 2 * 8 + 8
    attention = sum(2 * 4 * (s * s * 3 + s * s * 3) / 2 for s in lengths)  # layers·heads·(scores + values), causal
    assert model.matmul_parameters == weights + norms
    assert sum(model.forward_flops(lengths)) == 2 * (weights + norms) * 14 + 2 * attention
    assert train_flops(model, lengths) == 3 * sum(model.forward_flops(lengths))


def test_mfu():
    assert model_flops_utilisation(4e15, seconds=10, devices=2, peak_flops=1e15) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="peak_flops = 0"):
        model_flops_utilisation(1, 1, 1, 0)
