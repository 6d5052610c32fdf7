"""ReMax in the whole trainer: greedy responses beside sampled ones, through rewards to the loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.runs import run

PROMPTS, GROUP = 7, 2  # two engines have 7 rows each, which cuts a group; and so do two data-parallel ranks
REMAX = (
    "rl_config.adv_estimator=remax",
    f"megatron_training.global_batch_size={PROMPTS}",
    f"rl_config.mini_batch_size={PROMPTS}",
    f"rl_config.n_samples_per_prompt={GROUP}",
    "megatron_training.no_shuffle=true",
    "rl_config.loss_agg_mode=seq-mean-token-mean",
    "rl_config.overlong_buffer_enable=true",
    "rl_config.overlong_buffer=1",
    "rl_config.overlong_buffer_penalty_factor=0.25",
    "generate_config.per_request_seed=false",
)


def greedy_rewards(inputs: Path) -> list[float]:
    """Rewards of what the model that the run starts from answers to the first iteration's prompts."""
    verifier: dict[str, Any] = {}
    exec((inputs / "rewards.py").read_text(), verifier)
    model: Any = AutoModelForCausalLM.from_pretrained(inputs / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(inputs / "model")
    rewards = []
    for line in (inputs / "data.jsonl").read_text().splitlines()[:PROMPTS]:
        row = json.loads(line)
        prompt = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        output = model.generate(prompt, max_new_tokens=3, do_sample=False)[0, prompt.shape[1] :]
        text = tokenizer.decode(output, skip_special_tokens=True)
        penalty = 0.25 if len(output) == 3 else 0.0
        rewards.append(verifier["overlap"](row["prompt"], text, row["answer"]) - penalty)
    return rewards


def test_samples_train_by_what_they_are_better_than_the_greedy_response(inputs: Path, tmp_path: Path) -> None:
    steps = run(inputs, tmp_path, *REMAX)
    expected = greedy_rewards(inputs)
    assert len(set(expected)) > 1
    assert steps[0]["reward/baseline_mean"] == pytest.approx(sum(expected) / PROMPTS, abs=1e-6)
    for step in steps:
        assert step["reward_failed_baselines"] == 0
        assert step["reward_status/ok"] == PROMPTS * (GROUP + 1)
        # the policy ratio is 1, so the mean loss of a sample is minus its advantage
        advantage = step["reward/mean"] - step["reward/baseline_mean"]
        assert advantage != 0
        assert step["actor/pg_loss"] == pytest.approx(-advantage, abs=1e-5)
        assert step["actor/grad_norm"] > 0
    assert steps[1]["reward/baseline_mean"] != steps[0]["reward/baseline_mean"], "of the newest policy"
