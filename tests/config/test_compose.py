"""Composition, overrides, and errors of types: all at once, with key path, value and suggestion."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.compose import compose_yaml, load_config, schema_keys, validate
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.memory import GIB, estimate_memory
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = sorted(path.stem for path in CONFIGS.glob("*po/*.yaml"))

# MindSpeed RL's documented keys of a GRPO run
REFERENCE_KEYS = {
    "megatron_training": """
        stage global_batch_size data_path tokenizer_name_or_path
        recompute_granularity recompute_num_layers recompute_method""",
    "actor_config": """
        micro_batch_size tensor_model_parallel_size pipeline_model_parallel_size lr lr_decay_style min_lr weight_decay
        lr_warmup_fraction clip_grad load save no_load_optim no_load_rng no_save_optim no_save_rng""",
    "rl_config": """
        use_integrated_worker blocking gamma lam actor_forward_micro_batch_size ref_forward_micro_batch_size
        adv_estimator kl_penalty kl_ctrl_type init_kl_coef mini_batch_size max_prompt_length clip_ratio entropy_coeff
        n_samples_per_prompt guarantee_order shuffle_mini_batch log_max_throughput num_cpus_for_local_task
        actor_resource actor_resource.num_npus rule_reward verifier_function verifier_weight
        filter_groups_enable filter_groups_metric filter_groups_max_batches
        use_tensorboard use_wandb wandb_project wandb_exp_name wandb_save_dir""",
    "generate_config": """
        infer_tensor_parallel_size infer_pipeline_parallel_size infer_expert_parallel_size
        trust_remote_code offload_train_optimizer offload_train_grad offload_train_param
        max_num_seqs max_model_len max_num_batched_tokens enforce_eager torchair_graph enable_expert_parallel dtype
        gpu_memory_utilization num_scheduler_steps""",
    "generate_config.sampling_config": "logprobs max_tokens top_p top_k min_p temperature detokenize",
}


def violations_of(*overrides: str, name: str = "grpo_trainer_tiny_cpu", **options) -> dict[str, str]:
    """Key path -> message of every violation."""
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides, **options)
    return {violation.path: str(violation) for violation in caught.value.violations}


def test_every_reference_key_is_in_the_schema():
    known = {".".join(path) for path in schema_keys(Config)}
    wanted = {f"{section}.{key}" for section, keys in REFERENCE_KEYS.items() for key in keys.split()}
    assert wanted <= known


@pytest.mark.parametrize("name", RUNS)
def test_shipped_run_configurations_are_valid(name):
    cfg, text = load_config(name)
    assert validate(yaml.safe_load(text)) == cfg
    assert isinstance(resolve_model(cfg), ModelConfig)


@pytest.mark.parametrize("path", sorted((CONFIGS / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_named_after_their_file(path):
    content = yaml.safe_load(path.read_text().replace("e-", ".0e-"))  # YAML 1.1 wants a point in a float
    assert list(content) == [path.stem]


# totals of the published checkpoints (model.safetensors), tied embeddings stored once
PUBLISHED_PARAMETERS = {
    "qwen25_0b5": 494_032_768,
    "qwen25_1b5": 1_543_714_304,
    "qwen25_7b": 7_615_616_512,
    "qwen25_14b": 14_770_033_664,
    "qwen25_32b": 32_763_876_352,
    "qwen25_72b": 72_706_203_648,
    "qwen3_0b6": 596_049_920,
    "qwen3_1b7": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_8b": 8_030_261_248,
    "llama32_1b": 1_235_814_400,
    "mistral_7b": 7_248_023_552,
    "smollm2_135m": 134_515_008,
    "deepseekv2_lite": 15_706_484_224,
    "deepseekv3_671b": 671_026_419_200,  # without the scales of fp8 and the layer for a further token
}


@pytest.mark.parametrize("preset", sorted(PUBLISHED_PARAMETERS))
def test_presets_have_the_published_number_of_parameters(preset, tmp_path):
    (tmp_path / "run.yaml").write_text(f"defaults:\n  - model: [{preset}]\n  - _self_\n")
    content = yaml.safe_load(compose_yaml("run", config_dir=str(tmp_path)))["model"]
    assert ModelConfig(**content[preset]).num_parameters == PUBLISHED_PARAMETERS[preset]


def test_every_preset_is_compared_with_a_published_model():
    assert {*PUBLISHED_PARAMETERS, "tiny_qwen2", "tiny_qwen3_moe", "tiny_deepseek_v3"} == {
        path.stem for path in (CONFIGS / "model").glob("*.yaml")
    }


# GiB that a device of a shipped run has: NPUs of the Atlas A2 and A3 series (a die), and by the name's ending
DEVICE_MEMORY = {"npu": 64, "h200": 139}
ACCELERATED = [name for name in RUNS if "_cpu" not in name]


@pytest.mark.parametrize("name", ACCELERATED)
def test_shipped_run_configurations_fit_their_devices(name):
    cfg, _ = load_config(name)
    machine = name.rpartition("_")[2]
    assert cfg.device == ("cuda" if machine == "h200" else "npu")
    memory = DEVICE_MEMORY.get(machine, DEVICE_MEMORY["npu"]) * GIB
    estimate = estimate_memory(cfg, resolve_model(cfg), derive_layout(cfg))
    assert estimate.training + (0 if cfg.generate_config.offload_reference else estimate.reference) < 0.85 * memory
    rollout = cfg.generate_config.gpu_memory_utilization * memory
    assert estimate.training_kept + rollout < 0.9 * memory
    # room for the cache of many sequences at full length; the others wait their turn
    assert rollout - estimate.rollout_weights > 32 * cfg.generate_config.max_model_len * estimate.kv_per_token


def test_every_accelerated_run_has_a_sibling_on_the_other_device():
    npu = {name for name in ACCELERATED if not name.endswith("_h200")}
    assert {f"{name}_h200" for name in npu} <= set(ACCELERATED)


def test_unknown_configuration_names_near_ones():
    message = violations_of(name="grpo_trainer_qwen25_7B")["--config-name"]
    assert "did you mean grpo_trainer_qwen25_7b" in message


def test_unknown_preset_names_near_ones(tmp_path):
    (tmp_path / "run.yaml").write_text("defaults:\n  - model: qwen25_7\n  - _self_\n")
    message = violations_of(name="run", config_dir=str(tmp_path))["defaults"]
    assert "model/qwen25_7" in message
    assert "did you mean qwen25_7b?" in message


def test_a_users_folder_reaches_our_presets_and_runs(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - grpo_trainer_tiny_cpu\n  - model: [qwen3_0b6]\n  - _self_\nactor_config:\n  lr: 5e-6\n"
    )
    cfg, _ = load_config("mine", config_dir=str(tmp_path))
    assert cfg.actor.lr == 5e-6
    assert set(cfg.model) == {"tiny_qwen2", "qwen3_0b6"}
    assert load_config("grpo_trainer_qwen25_7b", config_dir=str(tmp_path))[0].actor.tensor_model_parallel_size == 4


def test_a_users_preset(tmp_path):
    (tmp_path / "model").mkdir()
    text = (CONFIGS / "model" / "tiny_qwen2.yaml").read_text().replace("tiny_qwen2:", "small:")
    (tmp_path / "model" / "small.yaml").write_text(re.sub(r"num_layers: \d+", "num_layers: 4", text))
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - grpo_trainer_tiny_cpu\n  - override model: small\n  - _self_\nactor_config:\n  model: small\n"
    )
    cfg, _ = load_config("mine", config_dir=str(tmp_path))
    assert resolve_model(cfg).num_layers == 4


def test_an_installed_package_reads_its_own_copy(tmp_path):
    shutil.copytree(
        CONFIGS.parent / "mindspeed_rl", tmp_path / "mindspeed_rl", ignore=shutil.ignore_patterns("*.pyc")
    )
    shutil.copytree(CONFIGS, tmp_path / "mindspeed_rl" / "_configs")
    (tmp_path / "configs" / "grpo").mkdir(parents=True)  # of some other package in the same site-packages
    script = "from mindspeed_rl.config.compose import load_config as l; print(l('grpo_trainer_tiny_cpu')[0].device)"
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == "cpu\n"


def test_config_dir_that_is_no_folder():
    assert "is not a folder" in violations_of(config_dir="nowhere/at/all")["--config-dir"]


@pytest.mark.parametrize("text", ["a: [1", "a: 1\n b: 2", "- 1\n- 2\n", "a: ${nothing}"])
def test_unreadable_yaml_is_a_configuration_error(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    assert violations_of(name="run", config_dir=str(tmp_path))


def test_required_marker(tmp_path):
    (tmp_path / "run.yaml").write_text("defaults:\n  - grpo_trainer_tiny_cpu\n  - _self_\nrun_name: ???\n")
    assert violations_of(name="run", config_dir=str(tmp_path)) == {
        "run_name": "run_name = '???': marked as required, but not set"
    }


def test_actor_config_wins_over_megatron_training():
    shared = ["megatron_training.lr=1e-4", "megatron_training.seed=7"]
    cfg, _ = load_config("grpo_trainer_tiny_cpu", [*shared, "actor_config.lr=2e-3"])
    assert (cfg.actor.lr, cfg.actor.seed) == (2e-3, 7)


def test_overrides():
    cfg, text = load_config(
        "grpo_trainer_tiny_cpu",
        [
            "actor_config.lr=1e-6",  # no point: still a number
            "actor_config.clip_grad=0.5",  # a key that the YAML does not name
            "generate_config.sampling_config.top_p=0.9",
            "actor_config.data_path=[a.jsonl,b.jsonl]",
            "rl_config.custom_reward_function=null",
            "run_name='7'",
            "~actor_config.save",
        ],
    )
    assert (cfg.actor.lr, cfg.actor.clip_grad) == (1e-6, 0.5)
    assert cfg.generate_config.sampling_config.top_p == 0.9
    assert cfg.actor.data_path == ["a.jsonl", "b.jsonl"]
    assert (cfg.run_name, cfg.actor.save) == ("7", None)
    assert validate(yaml.load(text, yaml.SafeLoader)) == cfg


@pytest.mark.parametrize("key", ["num_npus", "num_devices"])
def test_devices_have_two_names(key, tmp_path):
    cfg, text = load_config("grpo_trainer_tiny_cpu", [f"rl_config.actor_resource.{key}=4"])
    assert cfg.rl_config.actor_resource.num_npus == 4
    both = yaml.safe_load(text)
    both["rl_config"]["actor_resource"] = {"num_npus": 4, "num_devices": 2}
    with pytest.raises(
        ConfigError, match="'num_npus': 4, 'num_devices': 2}: num_devices is another name of num_npus"
    ):
        validate(both)


@pytest.mark.parametrize("order", [1, -1])
def test_devices_overridden_under_both_names_are_refused(order):
    overrides = ["rl_config.actor_resource.num_npus=4", "rl_config.actor_resource.num_devices=2"]
    found = violations_of(*overrides[::order])
    assert list(found) == ["rl_config.actor_resource"]
    for part in ("'num_npus': 4", "'num_devices': 2", "keep one of the two"):
        assert part in found["rl_config.actor_resource"]


@pytest.mark.parametrize(
    ("override", "path", "parts"),
    [
        ("actor_config.lrr=1", "actor_config.lrr", ["unknown key", "did you mean actor_config.lr?"]),
        (
            "rl_config.lr=1",
            "rl_config.lr",
            ["did you mean megatron_training.lr or actor_config.lr or critic_config.lr?"],
        ),
        (
            "rl_config.max_token=1",
            "rl_config.max_token",
            ["did you mean generate_config.sampling_config.max_tokens or generate_config.val_sampling_config"],
        ),
        ("zzz=1", "zzz", ["unknown key", "docs/configuration.md"]),
        ("a b=1", "a b", ["cannot parse the override", "quotes"]),
        ("actor_config.lr=1e-5,1e-6", "actor_config.lr", ["choice of values", "[a,b]"]),
        ("hydra.verbose=true", "hydra.verbose", ["no effect here"]),
        ("model=qwen25", "defaults", ["model/qwen25", "did you mean qwen25_"]),
        ("device=gpu", "device", ["'gpu'", "'cuda'", "did you mean npu?"]),
        ("rl_config.adv_estimator=groupnorm", "rl_config.adv_estimator", ["'groupnorm'", "did you mean group_norm?"]),
        ("actor_config.seed=2147483648", "actor_config.seed", ["less than or equal to 2147483647"]),
        ("actor_config.adam_beta1=1.0", "actor_config.adam_beta1", ["= 1.0", "less than 1"]),
        ("actor_config.adam_beta2=1", "actor_config.adam_beta2", ["less than 1"]),
        # two branches refuse it: the section's other keys stay as they are, and no rule complains about defaults
        (
            "generate_config.sampling_config.logprobs=5",
            "generate_config.sampling_config.logprobs",
            ["= 5", "true or false", "less than or equal to 1"],
        ),
        ("rl_config.blocking=yes", "rl_config.blocking", ["'yes'", "write true or false"]),
        ("rl_config.staleness=true", "rl_config.staleness", ["= True", "a number, not a truth value"]),
        ("rl_config.entropy_coeff=false", "rl_config.entropy_coeff", ["= False", "a number, not a truth value"]),
        ("rl_config.verifier_weight=[true]", "rl_config.verifier_weight", ["[True]", "a number, not a truth value"]),
        ("rl_config.stage_timeout_minutes=1e300", "rl_config.stage_timeout_minutes", ["1e+300", "100000"]),
        ("rl_config.epochs=0", "rl_config.epochs", ["= 0", "greater than or equal to 1"]),
        ("rl_config.epochs=1.5", "rl_config.epochs", ["1.5", "whole number"]),
        ("actor_config.lr=fast", "actor_config.lr", ["'fast'", "valid number"]),
        ("actor_config.lr=nan", "actor_config.lr", ["nan", "finite"]),
        ("actor_config.data_path=3", "actor_config.data_path", ["valid string; or: should be a valid list"]),
        ("rl_config.verifier_weight=[1,x]", "rl_config.verifier_weight.1", ["'x'", "valid number"]),
        ("actor_config=3", "actor_config", ["is not a section"]),
        ("generate_config.sampling_config=3", "generate_config.sampling_config", ["is not a section"]),
        ("~model.tiny_qwen2.num_layers", "model.tiny_qwen2.num_layers", ["required, but missing"]),
        ("model.tiny_qwen2.num_layer=3", "model.tiny_qwen2.num_layer", ["unknown key"]),
        (
            "model.tiny_qwen2.rope_scaling={rope_type: linear}",
            "model.tiny_qwen2.rope_scaling.factor",
            ["required, but missing"],
        ),
        (
            "model.tiny_qwen2.rope_scaling={rope_type: yarn, factor: 4}",
            "model.tiny_qwen2.rope_scaling",
            ["'factor': 4}", "original_max_position_embeddings is needed with rope_type = 'yarn'"],
        ),
        (
            "model.tiny_qwen2.rope_scaling={rope_type: dynamic, factor: 4}",
            "model.tiny_qwen2.rope_scaling.rope_type",
            ["'dynamic'", "'linear', 'llama3' or 'yarn'"],
        ),
        ("rl_config.custom_reward_function={}", "rl_config.custom_reward_function.path", ["required, but missing"]),
    ],
)
def test_type_errors_name_key_value_and_suggestion(override, path, parts):
    found = violations_of(override)
    assert list(found) == [path]
    for part in parts:
        assert part in found[path]


def test_everything_wrong_is_reported_at_once():
    found = violations_of(
        "actor_config.lrr=1",  # unknown
        "device=gpu",  # not a choice: leaves out the rule on device: cpu
        "actor_config.lr=fast",  # wrong type
        "rl_config.mini_batch_size=0",  # out of range: leaves out the rules on mini-batches
        "rl_config.verifier_function=[reasoning_gim]",  # rule
        "generate_config.max_model_len=4",  # rule
        "generate_config.num_scheduler_steps=2",  # refused
    )
    assert set(found) == {
        "actor_config.lrr",
        "device",
        "actor_config.lr",
        "rl_config.mini_batch_size",
        "rl_config.verifier_function.0",
        "generate_config.max_model_len",
        "generate_config.num_scheduler_steps",
    }


def test_all_bad_overrides_are_reported_at_once():
    assert set(violations_of("a b=1", "c d=2")) == {"a b", "c d"}


def test_message_counts_and_lists_the_violations():
    with pytest.raises(ConfigError, match=re.escape("2 configuration errors:\n  - ")) as caught:
        load_config("grpo_trainer_tiny_cpu", ["actor_config.lrr=1", "device=gpu"])
    assert caught.value.exit_code == 2


def test_missing_files_are_violations_of_a_real_run(tmp_path):
    found = violations_of(
        "actor_config.data_path=nodata.jsonl",
        "actor_config.tokenizer_name_or_path=notokenizer",
        "actor_config.load=nomodel",
        "rl_config.verifier_function=[custom]",
        "rl_config.custom_reward_function={path: noreward.py}",
        files_exist=True,
    )
    assert set(found) == {
        "actor_config.data_path",
        "actor_config.tokenizer_name_or_path",
        "actor_config.load",
        "rl_config.custom_reward_function.path",
    }
    assert str(Path.cwd() / "nodata.jsonl") in found["actor_config.data_path"]


def test_folders_that_hold_nothing_of_use(tmp_path):
    found = violations_of(f"actor_config.load={tmp_path}", f"actor_config.tokenizer_name_or_path={tmp_path}")
    assert "neither config.json" in found["actor_config.load"]
    assert "neither tokenizer.json" in found["actor_config.tokenizer_name_or_path"]


def test_checkpoint_without_config_json_needs_a_preset(tmp_path):
    (tmp_path / "latest").write_text("iter_0000001\n")
    load_config("grpo_trainer_tiny_cpu", [f"actor_config.load={tmp_path}"])
    found = violations_of(f"actor_config.load={tmp_path}", "actor_config.model=auto")
    assert "name a preset" in found["actor_config.model"]


def test_data_may_be_a_prefix(tmp_path):
    (tmp_path / "gsm8k_packed.parquet").touch()
    found = violations_of(f"actor_config.data_path={tmp_path}/gsm8k", "actor_config.load=nomodel", files_exist=True)
    assert "actor_config.data_path" not in found
