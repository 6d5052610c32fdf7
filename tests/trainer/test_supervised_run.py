"""SFT and DPO as a user starts them: they learn, go on exactly, validate, and hand weights on."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from examples.make_preferences import make_preferences
from mindspeed_rl.checkpoint.state import CheckpointStore
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.schema import Config
from mindspeed_rl.trainer.source import choose_source
from tests.support.forked import run_forked

LEARNING = ("actor_config.lr=3e-3", "actor_config.lr_decay_style=cosine")


def run(inputs: Path, output: Path, stage: str, *overrides: str, name: str = "run") -> list[dict[str, Any]]:
    """Metrics of every step of a run of two ranks that must succeed."""
    arguments = [
        f"--config-name={stage}_tiny_cpu",
        f"output_dir={output}",
        f"run_name={name}",
        f"megatron_training.tokenizer_name_or_path={inputs}/model",
        f"megatron_training.data_path={inputs}/data.jsonl",
        f"actor_config.load={inputs}/model",
        f"actor_config.save={output}/checkpoints",
        *overrides,
    ]
    said = output / f"{name}.txt"
    assert run_forked(f"train_{stage}", arguments, said) == 0, said.read_text()[-6000:]
    return [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]


def learned(step: dict[str, Any]) -> dict[str, Any]:
    """What training computed, not how long it took."""
    return {
        name: value for name, value in step.items() if name.startswith(("sft/", "dpo/", "actor/", "val/", "data/"))
    }


def test_fine_tuning_learns_validates_and_goes_on_exactly(inputs: Path, tmp_path: Path) -> None:
    settings = (
        *LEARNING,
        "megatron_training.train_iters=40",
        "megatron_training.global_batch_size=12",  # of 16 rows: batches reach over epochs
        "megatron_training.save_interval=20",
        f"megatron_training.val_data_path={inputs}/data.jsonl",
        "rl_config.test_freq=20",
        "rl_config.val_before_train=true",
        "actor_config.save_hf=true",
        "actor_config.micro_batch_size=2",
        "trace=true",
    )
    before, *steps = run(inputs, tmp_path, "sft", *settings)
    assert [step["step"] for step in steps] == list(range(1, 41))
    assert before["step"] == 0
    assert before["val/all/loss"] == before["val/data/loss"]  # one source, named after its file
    assert before["val/all/loss"] > 1.0
    assert steps[-1]["val/all/loss"] < 0.35
    assert steps[-1]["sft/loss"] < 0.5 < steps[0]["sft/loss"]
    assert steps[-1]["data/epoch"] == pytest.approx(40 * 12 / 16)
    assert "val/all/loss" in steps[19]
    assert "val/all/loss" not in steps[18]
    for name in ("throughput/total", "throughput/update", "timing/update", "timing/all", "memory/host_peak", "lr"):
        assert steps[5][name] > 0, name
    assert {event["name"] for event in json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]} > {
        "update",
        "validation",
    }

    root = tmp_path / "checkpoints"
    middle = f"actor_config.load={root}/iter_0000020"
    again = run(inputs, tmp_path, "sft", *settings, middle, name="again")
    assert [learned(step) for step in again] == [learned(step) for step in steps[20:]]

    # its weights are where a run of another kind starts: the checkpoint's, or the folder that others read, too
    def config(**actor: object) -> Config:
        return Config(megatron_training={}, actor_config={"load": str(root), **actor})

    with pytest.raises(CheckpointError, match=r"stage = 'sft', this one has 'ray_grpo': set finetune: true"):
        choose_source(config())
    source, state = choose_source(config(finetune=True))
    assert (source.weights, state) == (str(root / "iter_0000040"), None)
    checkpoint = CheckpointStore(str(root)).latest()
    assert checkpoint is not None
    assert AutoModelForCausalLM.from_pretrained(Path(checkpoint) / "hf").config.num_hidden_layers == 2


def test_preferences_widen_the_margin_of_adapters_by_tokens(inputs: Path, tmp_path: Path) -> None:
    """With the actor without adapters as the reference, and micro-batches of as many pairs as a cap holds."""
    rows = make_preferences(inputs / "data.jsonl")
    assert all(row["chosen"] != row["rejected"] for row in rows)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = run(
        inputs,
        tmp_path,
        "dpo",
        f"megatron_training.data_path={tmp_path}/pairs.jsonl",
        f"megatron_training.val_data_path={tmp_path}/pairs.jsonl",
        "megatron_training.train_iters=12",
        "megatron_training.global_batch_size=8",
        "rl_config.test_freq=12",
        "rl_config.use_dynamic_bsz=true",
        "rl_config.max_packing_token_size=40",
        "~actor_config.micro_batch_size",
        "actor_config.lora_r=8",
        "actor_config.lr=1e-2",
        "actor_config.save=null",
    )
    assert steps[0]["dpo/loss"] == pytest.approx(0.693147, abs=1e-6)  # ln 2: nothing has moved
    assert steps[0]["dpo/margin"] == 0.0
    assert steps[-1]["dpo/margin"] > 0.1
    assert steps[-1]["val/all/accuracy"] > 0.8
    assert steps[-1]["val/all/loss"] < 0.65
    assert steps[5]["timing/reference_model"] > 0
