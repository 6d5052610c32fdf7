"""Inputs that cannot be used, through the command line: a clear message, an exit code, and no Ray started."""

import json
from pathlib import Path

import pytest
import ray
from safetensors.torch import load_file, save_file
from support.reward_models import make_reward_model

from cli.train_grpo import main
from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.trainer import launch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and data that would train; each test spoils one thing."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model")
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def train(*overrides: str) -> int:
    return main(
        [
            "--config-name=grpo_trainer_tiny_cpu",
            "megatron_training.data_path=data.jsonl",
            "megatron_training.tokenizer_name_or_path=model",
            "actor_config.load=model",
            "actor_config.save=checkpoints",
            "rl_config.verifier_function=[math_verify]",
            *overrides,
        ]
    )


def assert_refused(capsys: pytest.CaptureFixture[str], exit_code: int, expected_code: int, *fragments: str) -> None:
    message = capsys.readouterr().err
    assert exit_code == expected_code, message
    for fragment in fragments:
        assert fragment in message
    assert "Traceback" not in message
    assert not ray.is_initialized()
    assert not Path("outputs").exists()  # a run that never started leaves no folder


def test_missing_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, train("actor_config.load=nowhere"), 2, "actor_config.load = 'nowhere'", "no such")


def test_truncated_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert_refused(capsys, train(), 1, "model.safetensors")


def test_weights_of_another_architecture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model(folder / "other", architecture="qwen3")
    (folder / "other" / "model.safetensors").replace(folder / "model" / "model.safetensors")
    assert_refused(capsys, train(), 1, "q_proj.bias")


def test_checkpoint_that_was_not_finished(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run" / "iter_0000003").mkdir(parents=True)
    (folder / "run" / "latest").write_text("iter_0000003")
    assert_refused(capsys, train("actor_config.load=run"), 1, "run/iter_0000003 holds no complete checkpoint")


def test_preset_that_contradicts_the_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model(folder / "model", layers=4)
    assert_refused(capsys, train(), 2, "num_layers", "2", "4")


def test_tokenizer_with_more_tokens_than_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["x"] = 40
    path.write_text(json.dumps(tokenizer))
    assert_refused(capsys, train(), 1, "tokenizer mismatch", "40", "vocab_size = 16")


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"", ("data.jsonl", "empty")),
        (b'{"question": "1+1=", "answer": "2"}\n', ("data.jsonl:1", "prompt_key = 'prompt'", "question")),
        (b'{"prompt": "1+1="}\n', ("data.jsonl:1", "answer_key = 'answer'")),
        (b'{"prompt": "1+1=", "answer": "2"}\n\xff\xfe\n', ("data.jsonl:2", "UTF-8")),
        (b'{"prompt": "1+1=", "answer": "2"\n', ("data.jsonl:1", "JSON")),
        (b'{"prompt": "1+1+1+1+1+1+1=", "answer": "7"}\n', ("max_prompt_length = 8",)),
    ],
    ids=["empty", "no-prompt-key", "no-answer", "not-utf-8", "not-json", "all-too-long"],
)
def test_data_that_cannot_be_used(
    content: bytes, fragments: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.jsonl").write_bytes(content)
    assert_refused(capsys, train(), 1, *fragments)


@pytest.mark.parametrize(("key", "value"), [("actor_config.save", "/proc/save"), ("output_dir", "/proc/outputs")])
def test_folder_that_cannot_be_written(
    key: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(capsys, train(f"{key}={value}"), 2, f"{key} = '{value}'", "cannot be written")


def test_device_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train("device=npu", "generate_config.dtype=bfloat16")
    assert_refused(capsys, code, 2, "device = 'npu'", "torch_npu is not installed")


def test_ring_attention_where_the_devices_found_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = ["actor_config.context_parallel_size=2", "actor_config.context_parallel_algo=megatron_cp_algo"]
    config, _ = load_config("grpo_trainer_qwen25_7b", ["device=auto", *ring])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"NPU": 8.0})
    with pytest.raises(ConfigError, match=r"context_parallel_algo = 'megatron_cp_algo': .* device = 'npu'"):
        launch._device(config)


def test_response_length_of_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train("generate_config.sampling_config.max_tokens=0")
    assert_refused(capsys, code, 2, "generate_config.sampling_config.max_tokens = 0")


def test_custom_reward_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rewards.py").write_text("def other(prompt, response, label): return 1.0\n")
    code = train("rl_config.verifier_function=[custom]", "rl_config.custom_reward_function.path=rewards.py")
    assert_refused(capsys, code, 2, "rl_config.custom_reward_function", "compute_score")


@pytest.mark.parametrize(
    ("content", "overrides", "fragments"),
    [
        (None, ["rl_config.loss_type=mine"], ("custom_algorithm_file = 'mine.py'", "no such file")),
        ("1/0", ["rl_config.loss_type=mine"], ("custom_algorithm_file = 'mine.py'", "ZeroDivisionError")),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int",
            ["rl_config.adv_estimator=mine"],  # the file is all right
            ("adv_estimator = 'mine'", "registered neither here nor"),
        ),
        ("", ["rl_config.loss_type=mine"], ("loss_type = 'mine'", "registered neither here nor", "known: ppo, gspo")),
        (
            "from mindspeed_rl.algorithms.losses import POLICY_LOSSES as P\nP.register('ppo')(print)",
            ["rl_config.loss_type=mine"],
            ("custom_algorithm_file", "'ppo' is registered already"),
        ),
    ],
    ids=["absent", "raises", "unknown estimator", "unregistered", "taken"],
)
def test_custom_algorithms_that_cannot_be_used(
    content: str | None,
    overrides: list[str],
    fragments: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (folder / "mine.py").write_text(content)
    assert_refused(capsys, train("rl_config.custom_algorithm_file=mine.py", *overrides), 2, *fragments)


def test_everything_wrong_is_reported_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train("rl_config.clip_ratoi=0.1", "actor_config.tensor_model_parallel_size=3", "actor_config.lr=-1")
    assert_refused(
        capsys,
        code,
        2,
        "rl_config.clip_ratoi",
        "clip_ratio",
        "actor_config.tensor_model_parallel_size",
        "actor_config.lr",
    )


def test_weights_for_a_source_that_no_row_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train("rl_config.source_verifier_weight={dta: {math_verify: 1.0}}")
    assert_refused(capsys, code, 2, "source_verifier_weight.dta", "no row is of this source", "did you mean data?")


def test_reward_models_that_score_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = make_reward_model(folder / "reward")
    load, weights = "reward_config.load=reward", reward / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "score.weight"}, weights)
    assert_refused(
        capsys, train(load), 2, "reward_config.load = 'reward'", "has no score.weight", "make_reward_model"
    )
    save_file({**tensors, "score.weight": tensors["score.weight"].repeat(2, 1)}, weights)
    assert_refused(capsys, train(load), 2, "score.weight has the shape [2, 64], expected [1, 64]")
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1" not in name}, weights)
    assert_refused(capsys, train(load), 1, "lacks 12 tensors", "model.layers.1.")
    save_file(tensors, weights)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (reward / file).unlink()
    assert_refused(capsys, train(load), 2, "reward_config.load = 'reward'", "holds neither tokenizer.json nor")
    (folder / "template").write_text("{{ raise_exception('no') }}")
    template = ("reward_config.chat_template=template", "reward_config.tokenizer_name_or_path=model")
    assert_refused(capsys, train(load, *template), 1, "the reward model's chat template refuses", "1+1=")
    assert_refused(capsys, train("reward_config.load=none"), 2, "reward_config.load = 'none'", "no such folder")
