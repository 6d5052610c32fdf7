"""Rewards of a reward model in the whole trainer: those that transformers computes, in every way it is called."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reward_models import make_reward_model, scores_of, write_other_tokenizer

from examples.make_tiny_model import make_tokenizer
from mindspeed_rl.data.tokenizer import load_tokenizer
from tests.support.runs import run

TEMPLATE = "{% for m in messages %}{{ '=' if m['role'] == 'assistant' else '*' }}{{ m['content'] }}{% endfor %}/"
SEEN = """
import json, pathlib

def partly(prompt, response, label, **extra):
    with open(pathlib.Path(__file__).parent / "seen.jsonl", "a") as file:
        file.write(json.dumps([prompt, response]) + chr(10))
    return 0.5 if prompt.startswith("0") else sum(map(str.isdigit, response)) / 8
"""
FILTERED = (  # dynamic sampling: in waves, between which the model has the device
    "rl_config.blocking=true",
    "rl_config.filter_groups_enable=true",
    "rl_config.filter_groups_metric=custom",
    "rl_config.custom_reward_function.name=partly",
    "rl_config.reward_model_weight=2.0",
    "rl_config.reward_scale=0.5",
    "generate_config.offload_reward_model=true",
)
APART = (
    "rl_config.rule_reward=false",
    "rl_config.verifier_function=[]",
    "rl_config.verifier_weight=[]",
    "rl_config.custom_reward_function=null",
    "rl_config.use_integrated_worker=false",
    "rl_config.actor_resource.num_npus=1",
    "rl_config.rollout_resource.num_npus=1",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model")


def shown(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


def scores(model: Path, texts: list[str], tokenizer: Any) -> list[float]:
    return scores_of(model, [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]).tolist()


def test_filtered_groups_are_scored_beside_rules_in_every_wave(inputs: Path, tmp_path: Path, model: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    custom = f"rl_config.custom_reward_function.path={tmp_path}/seen.py"
    common = (f"reward_config.load={model}", "reward_config.micro_batch_size=3", "rl_config.sample_log_interval=1")
    steps = run(inputs, tmp_path, *FILTERED, *common, custom)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert max(step["rollout/waves"] for step in steps) > 1
    counts = [step["reward_model_rewards/ok"] for step in steps]
    assert sum(counts) == len(seen)
    expected = scores(model, [prompt + response for prompt, response in seen], make_tokenizer())
    means = [step["reward_model_rewards/mean"] for step in steps]
    total = sum(mean * count for mean, count in zip(means, counts, strict=True))
    assert total / len(seen) == pytest.approx(sum(expected) / len(seen), abs=1e-5)
    rows = shown(tmp_path)
    assert len(rows) >= 6
    of_model = scores(model, [row["prompt"] + row["response"] for row in rows], make_tokenizer())
    for row, score in zip(rows, of_model, strict=True):
        rule = 0.5 if row["prompt"].startswith("0") else sum(map(str.isdigit, row["response"])) / 8
        assert row["reward"] == pytest.approx(0.5 * (rule + 2 * score), abs=1e-5)
    for step in steps:
        assert step["timing/reward_model"] > 0
        assert "dock/wait/reward_model" in step
        assert step["reward_failed_samples"] == 0


def test_it_alone_with_tokens_of_its_own_beside_rollout_apart(inputs: Path, tmp_path: Path, model: Path) -> None:
    (tmp_path / "template").write_text(TEMPLATE)
    tokenizer = load_tokenizer(write_other_tokenizer(tmp_path / "tokenizer"))
    own = (
        f"reward_config.load={model}",
        f"reward_config.tokenizer_name_or_path={tmp_path}/tokenizer",
        f"reward_config.chat_template={tmp_path}/template",
        "rl_config.sample_log_interval=1",
    )
    steps, rows = run(inputs, tmp_path, *APART, *own), shown(tmp_path)
    texts = [f"*{row['prompt']}={row['response']}/" for row in rows]
    assert len(rows) >= 6
    assert [row["reward"] for row in rows] == pytest.approx(scores(model, texts, tokenizer), abs=1e-5)
    for step in steps:
        assert step["reward/mean"] == pytest.approx(step["reward_model_rewards/mean"])
        assert step["timing/reward_model"] > 0
        assert step["actor/grad_norm"] > 0
