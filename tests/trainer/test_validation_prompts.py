"""What a run validates on."""

import json
from pathlib import Path

import pytest

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.trainer.inputs import validation_prompts


def load(tiny_model_dir: Path, file: Path, *overrides: str):
    keys = (f"megatron_training.val_data_path={file}", "rl_config.test_freq=1", "rl_config.max_prompt_length=4")
    cfg, _ = load_config("grpo_trainer_tiny_cpu", [*keys, *overrides])
    return validation_prompts(cfg, load_tokenizer(tiny_model_dir))


def test_the_first_prompts_that_fit(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "val.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1" * n, "answer": str(n)}) + "\n" for n in (9, 2, 3, 4)))
    found = load(tiny_model_dir, file)
    assert found is not None
    assert ([sample.label for sample in found.samples], found.dropped_too_long) == (["2", "3", "4"], 1)
    # what limits training's data does not limit these
    few = load(tiny_model_dir, file, "megatron_training.val_max_samples=2", "megatron_training.train_max_samples=1")
    assert few is not None
    assert [sample.label for sample in few.samples] == ["2", "3"]


def test_without_data_nothing_is_validated(tiny_model_dir: Path) -> None:
    cfg, _ = load_config("grpo_trainer_tiny_cpu")
    assert validation_prompts(cfg, load_tokenizer(tiny_model_dir)) is None


def test_an_empty_file_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text("")
    with pytest.raises(DataError, match="the data set is empty"):
        load(tiny_model_dir, tmp_path / "val.jsonl")
