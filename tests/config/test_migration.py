"""Configurations of other projects become ours: values by hand, examples that cover every key of the references."""

import json
from pathlib import Path

import pytest
import yaml

from cli.migrate_config import main
from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.migration import Migration, migrate

HERE = Path(__file__).parent
EXAMPLES = {
    "mindspeed_rl": ["mindspeed_rl"],
    "verl": ["verl", "verl_sft", "verl_evaluation"],
    "rlinf": ["rlinf"],
}
PROJECT = {example: project for project, examples in EXAMPLES.items() for example in examples}


def _text(example: str) -> str:
    return (HERE / "migration" / f"{example}.yaml").read_text(encoding="utf-8")


def _migrated(example: str, *overrides: str) -> Migration:
    return migrate(PROJECT[example], _text(example), overrides)


def _keys(tree: dict, prefix: str = "") -> set[str]:
    found = set()
    for key, value in tree.items():
        found |= {f"{prefix}{key}"} | (_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else set())
    return found


@pytest.mark.parametrize("project", EXAMPLES)
def test_examples_cover_every_key(project: str) -> None:
    written = set[str]()
    for example in EXAMPLES[project]:
        keys = _keys(yaml.safe_load(_text(example)))
        kind = example.removeprefix(project).lstrip("_")
        written |= keys | {f"{kind}: {key}" for key in keys if kind}
    reference = set(json.loads((HERE / "reference_keys.json").read_text())[project])
    assert reference - written == ({"critic"} if project == "verl" else set())  # a section like the actor's


@pytest.mark.parametrize("example", ["mindspeed_rl", "verl", "verl_sft"])
def test_the_result_passes_our_rules(example: str, tmp_path: Path) -> None:
    overrides = ["rl_config.use_wandb=false"] if example == "mindspeed_rl" else []  # whose package tests do not have
    overrides += [f"rl_config.wandb_{key}=null" for key in ("project", "exp_name", "save_dir") if overrides]
    found = _migrated(example, *overrides)
    assert found.violations == []
    (tmp_path / "run.yaml").write_text(found.to_yaml(), encoding="utf-8")
    load_config("run", config_dir=str(tmp_path))


def test_mindspeed_rl_keeps_names_values_and_comments() -> None:
    found = _migrated("mindspeed_rl")
    theirs = yaml.safe_load(_text("mindspeed_rl"))
    ours = yaml.safe_load(found.to_yaml())
    assert ours["defaults"] == [{"model": "qwen25_7b"}, "_self_"]
    del theirs["megatron_training"]["not_ours"]
    for section in ("megatron_training", "actor_config", "generate_config"):
        assert _floats(ours[section]) == _floats(theirs[section])
    assert set(theirs["rl_config"]) == set(ours["rl_config"])
    assert "  global_batch_size: 64 # prompts\n" in found.to_yaml()
    assert "  # the folder of the weights holds it\n  tokenizer_name_or_path:" in found.to_yaml()
    left = {each.path: each.reason for each in found.left}
    assert left["megatron_training.not_ours"] == "is no key of the reference of mindspeed_rl"


def _floats(section: dict) -> dict:
    """YAML 1.1, which pyyaml reads, takes 2e-6 for text."""
    return {
        key: float(value) if isinstance(value, str) and value[0].isdigit() and "e-" in value else value
        for key, value in section.items()
    }


def test_verl_by_hand() -> None:
    found = _migrated("verl")
    expected = {
        "megatron_training.no_shuffle": False,
        "megatron_training.truncation": "drop",  # filtering comes before truncation: error
        "megatron_training.val_max_samples": 100,
        "megatron_training.lr_warmup_fraction": 30 / 600,  # steps come before the ratio of 0.5
        "megatron_training.min_lr": pytest.approx(2e-7),
        "megatron_training.train_iters": 600,
        "megatron_training.seq_length": 512 + 1024,
        "megatron_training.no_save_rng": True,
        "megatron_training.save_hf": True,
        "megatron_training.no_load_rng": False,
        "megatron_training.keep_last": 1,
        "megatron_training.answer_key": "reward_model.ground_truth",
        "actor_config.save": "checkpoints/maths/gsm8k",
        "rl_config.actor_resource.num_npus": 16,
        "rl_config.init_kl_coef": 0.002,  # of the loss, not the 0.005 of the reward
        "rl_config.kl_penalty": "low_var_kl",
        "rl_config.rollout_is": "all",
        "rl_config.adv_estimator": "grpo",
        "rl_config.verifier_function": ["custom"],
        "rl_config.start_timeout_minutes": 5.0,
        "rl_config.use_tensorboard": True,
        "generate_config.val_sampling_config.temperature": 0.0,  # do_sample: false
        "generate_config.trust_remote_code": True,
        "generate_config.enable_prefix_caching": True,
    }
    assert {key: found.values.get(key) for key in expected} == expected
    assert "megatron_training.train_max_samples" not in found.values
    assert "lr: 2.0e-06 # the peak" in found.to_yaml()
    idle = {each.path for each in found.left if each.reason.startswith("has no effect")}
    assert "actor_config.micro_batch_size" in idle  # use_dynamic_bsz


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.3"], "rl_config.init_kl_coef", 0.3),
        (["actor_rollout_ref.actor.use_kl_loss=false"], "rl_config.init_kl_coef", 0.0),
        (["actor_rollout_ref.actor.rollout_is=false"], "rl_config.rollout_is", "off"),
        (["+algorithm.adv_estimator=gae"], "megatron_training.stage", "ray_ppo"),
        (["trainer.save_freq=-1", "trainer.default_local_dir=x"], "actor_config.save", None),
        (["trainer.resume_mode=disable"], "megatron_training.resume", "never"),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=a", "actor_rollout_ref.model.path=b"],
            "actor_config.load",
            "a",
        ),
        (
            [
                "trainer.nnodes=2",
                "trainer.n_gpus_per_node=4",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size=32",
            ],
            "rl_config.actor_forward_micro_batch_size",
            4,
        ),
        (["trainer.experiment_name=e", "trainer.logger=[wandb]"], "rl_config.wandb_exp_name", "e"),
        (["reward_model.enable=true", "reward_model.model.path=rm"], "reward_config.load", "rm"),
        (["critic.optim.lr=1e-3", "algorithm.adv_estimator=gae"], "critic_config.lr", 1e-3),
        (["critic.model.path=c", "algorithm.adv_estimator=gae"], "critic_config.load", "c"),
        (
            ["critic.optim.lr=0.5", "critic.optim.min_lr_ratio=0.5", "algorithm.adv_estimator=gae"],
            "critic_config.min_lr",
            0.25,
        ),
    ],
)
def test_verl_overrides(overrides: list[str], key: str, value: object) -> None:
    assert migrate("verl", "", overrides).values.get(key) == value


@pytest.mark.parametrize(
    ("project", "override", "reason"),
    [
        ("verl", "trainer.total_epochs=3", "train_iters is 3 x prompts of the data / global_batch_size"),
        ("verl", "actor_rollout_ref.actor.ppo_micro_batch_size=64", "trainer.n_gpus_per_node is not there"),
        ("verl", "trainer.logger=[trackio]", "there is no trackio"),
        ("verl", "actor_rollout_ref.actor.optim.lr_warmup_steps=10", "divide it by the optimizer steps"),
        ("verl", "actor_rollout_ref.rollout.engine_kwargs.vllm={swap_space: 4}", "generate_config has no swap_space"),
        ("verl", "critic.ppo_epochs=2", "is one key for actor and critic"),
        ("verl", "data.nothing=1", "is no key of the reference of verl"),
        ("rlinf", "algorithm.n_minibatches=4", "data.rollout_batch_size is not there"),
        ("rlinf", "actor.model.precision=fp16", "is none of bf16"),
        ("rlinf", "reward.reward_type=code", "choose verifiers"),
        ("mindspeed_rl", "defaults=[{model: qwen9}]", "no preset is called qwen9"),
        ("mindspeed_rl", "defaults=3", "cannot be converted: 'int' object is not iterable"),
        ("verl", "data.shuffle=maybe", "data.shuffle = 'maybe': is none of True, False"),
        ("verl", "data.filter_overlong_prompts=[1]", "cannot be converted"),
        ("verl", "trainer.n_gpus_per_node=many", "cannot be converted: invalid literal for int()"),
        ("verl", "trainer.ray_wait_register_center_timeout=x", "cannot be converted"),
    ],
)
def test_what_is_left_is_listed(project: str, override: str, reason: str) -> None:
    left = migrate(project, "", [override]).left
    assert [each.path for each in left] == [override.partition("=")[0].replace(".vllm.swap_space", ".vllm")]
    assert reason in str(left[0])


def test_rlinf_by_hand() -> None:
    found = _migrated("rlinf")
    expected = {
        "rl_config.mini_batch_size": 128,  # 512 prompts in 4
        "rl_config.clip_higher_enable": True,
        "rl_config.clip_ratio_high": 0.28,
        "generate_config.sampling_config.max_tokens": 3072,  # subtracted from the longest
        "megatron_training.min_lr": 2e-6,
        "device": "cuda",
        "rl_config.sample_log_interval": 0,
        "rl_config.verifier_function": ["math_verify"],
    }
    assert {key: found.values.get(key) for key in expected} == expected
    reasons = {each.path: each.reason for each in found.left}
    assert reasons["actor.lr_sched.min_lr"] == "megatron_training.min_lr is 2e-06 already, by another key"
    paths = {violation.path for violation in found.violations}
    assert "rl_config.actor_resource.num_npus" in paths  # devices are no key of that reference


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, source = tmp_path / "run.yaml", HERE / "migration" / "verl_sft.yaml"
    arguments = ["--from", "verl", "--input", str(source), "--output", str(target), "optim.lr=3e-5"]
    assert main(arguments) == 0
    assert "4 of their keys have no counterpart, or need a decision:\n  - model." in capsys.readouterr().err
    assert load_config("run", config_dir=str(tmp_path))[0].actor.lr == 3e-5
    assert main([*arguments, "--strict"]) == 1
    (tmp_path / "small.yaml").write_text("optim: {lr: 1e-5}\n")
    assert main(["--from", "verl", "--input", str(tmp_path / "none.yaml")]) == 1
    capsys.readouterr()
    assert main(["--from", "verl", "data.shuffle"]) == 2
    assert "data.shuffle = None: cannot be read (write key.path=value)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "a: ${b.c}\n"])
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--input"):
        migrate("verl", text)
