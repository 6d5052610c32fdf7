"""Keys that MindSpeed RL users know: what each does on which device, or why it is refused."""

from typing import Any

import pytest
from ascend_examples import ENV
from violations import BASE, violations_of

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.compose import load_config, validate
from mindspeed_rl.config.environment import DETERMINISTIC, NPU_VARIABLES
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.config.kernels import KERNEL_KEYS, uses_kernel
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.memory import activation_bytes
from mindspeed_rl.config.rules_ascend import unfit_for
from mindspeed_rl.config.schema import Config, MegatronConfig, RuntimeEnvConfig

CPU = "grpo_trainer_tiny_cpu"
DEVICES = {"npu": (BASE, "device=npu"), "cuda": (BASE, "device=cuda"), "cpu": (CPU, "device=cpu")}


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("key", KERNEL_KEYS)
def test_a_kernel_can_be_what_makes_a_difference(key: str, kind: str) -> None:
    name, device = DEVICES[kind]
    path, possible = f"megatron_training.{key}", KERNEL_KEYS[key][kind]
    assert uses_kernel(load_config(name, [device])[0].actor, key, kind) is possible[0]
    for value in (True, False):
        overrides = [device, f"{path}={str(value).lower()}"]
        if value in possible:
            cfg, _ = load_config(name, overrides)
            assert uses_kernel(cfg.actor, key, kind) is value
        else:
            (violation,) = violations_of(*overrides, name=name)
            assert (violation.path, violation.value) == (path, value)
            assert f"device = '{kind}'" in violation.message
        # found out when `auto` has become a device
        undecided = Config(megatron_training=MegatronConfig(**{key: value}))
        assert bool(list(unfit_for(undecided, kind))) == (value not in possible)


@pytest.mark.parametrize(
    ("key", "message", "suggestion"),
    [
        ("reuse_fp32_param", "offloading and checkpoints read whole", "use_distributed_optimizer: true"),
        ("swap_optimizer", "empty on the device between steps", "offload_train_optimizer: true"),
        ("swap_attention", "would have no effect: MindSpeed installs it in Megatron's own", "recompute_granularity"),
        ("moe_tp_extend_ep", "a slice of each", "a larger expert_model_parallel_size"),
    ],
)
def test_features_that_other_parts_do_not_go_together_with(key: str, message: str, suggestion: str) -> None:
    (violation,) = violations_of(f"megatron_training.{key}=true")
    assert (violation.path, violation.value) == (f"megatron_training.{key}", True)
    assert message in violation.message
    assert suggestion in (violation.suggestion or "")
    load_config(BASE, [f"megatron_training.{key}=false"])


@pytest.mark.parametrize("key", ["torchair_graph", "ascend_scheduler"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_features_of_vllm_ascend_are_for_npus(key: str, kind: str) -> None:
    undecided = Config(megatron_training=MegatronConfig(), generate_config=GenerateConfig(**{key: True}))
    assert not list(unfit_for(undecided, "npu"))
    (violation,) = unfit_for(undecided, kind)
    assert (violation.path, violation.value) == (f"generate_config.{key}", True)
    assert f"no effect with device = '{kind}'" in violation.message


def test_torchair_is_for_deepseek_models() -> None:
    asked = ["generate_config.torchair_graph=true", "generate_config.enforce_eager=false"]
    cfg, _ = load_config("grpo_trainer_deepseekv3_671b", asked)
    assert cfg.generate_config.torchair_graph


@pytest.mark.parametrize("key", ["npu_deterministic", "recompute_activation_function"])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_only_npus_have(key: str, kind: str) -> None:
    name, device = DEVICES[kind]
    (violation,) = violations_of(device, f"megatron_training.{key}=true", name=name)
    assert violation.path == f"megatron_training.{key}"
    assert f"no effect with device = '{kind}'" in violation.message
    assert load_config(BASE, [f"megatron_training.{key}=true"])


def test_recomputed_activations_take_less_memory_where_layers_are_not_recomputed() -> None:
    sizes = []
    for value in ("true", "false"):
        cfg, _ = load_config(BASE, [f"megatron_training.recompute_activation_function={value}"])
        model = resolve_model(cfg)
        sizes.append(activation_bytes(cfg, model, derive_layout(cfg)))
    # of 14 layers, and of the one that is recomputed at the time
    tokens, width = 2 * 4096, 2
    assert sizes[1] - sizes[0] == 15 * tokens * (model.ffn_hidden_size // 4) * width
    (violation,) = violations_of(
        "megatron_training.recompute_activation_function=true",
        "megatron_training.recompute_method=uniform",
        "megatron_training.recompute_num_layers=1",
    )
    assert "recomputes all layers" in violation.message


def test_chunks_without_a_layer_are_refused_for_that_alone() -> None:
    asked = ("recompute_activation_function=true", "recompute_granularity=full", "recompute_method=uniform")
    layout = ("pipeline_model_parallel_size=2", "num_layers_per_virtual_pipeline_stage=28")
    (violation,) = violations_of(*(f"actor_config.{key}" for key in (*asked, *layout)))
    assert violation.path == "actor_config.num_layers_per_virtual_pipeline_stage"


def test_keys_that_mindspeed_rl_publishes_are_taken() -> None:
    keys = ("use_flash_attn", "use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb", "bf16")
    load_config(BASE, [f"megatron_training.{key}=true" for key in keys])


# ---------------------------------------------------------------- environment


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("HCCL_BUFFSIZE", [1, "400"], [0, -1, "2.5", "200M"]),
        ("HCCL_CONNECT_TIMEOUT", [120, 7200], [119, 7201]),
        ("HCCL_EXEC_TIMEOUT", [0, 1836, 0.05, 2147483647], [-1, 2147483648, "1h"]),
        ("HCCL_IF_BASE_PORT", [48000], [80, 65521]),
        ("TASK_QUEUE_ENABLE", [0, 1, 2], [3, "on"]),
        ("ASCEND_LAUNCH_BLOCKING", [0, 1], [2]),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            ["max_split_size_mb:32,garbage_collection_threshold:0.6"],
            ["max_split_size_mb=3"],
        ),
        ("CPU_AFFINITY_CONF", [1, "mode:2", "1,npu0:0-1,npu1:2-5", "2,npu_affine:1"], [3, "true", "1 npu0:0-1"]),
        ("HCCL_DETERMINISTIC", ["true", "True", "strict"], [1]),
        ("LCCL_DETERMINISTIC", [0, 1], ["yes"]),
        ("ATB_MATMUL_SHUFFLE_K_ENABLE", [0, 1], [2]),
        ("ATB_LLM_LCOC_ENABLE", [0, 1], [2]),
        ("CLOSE_MATMUL_K_SHIFT", [0, 1], [2]),
    ],
)
def test_known_variables_take_values_that_mean_something(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in (*good, *bad):
        text = RuntimeEnvConfig(env_vars={name: value}).env_vars[name]
        assert NPU_VARIABLES[name].accepts(text) == (value in good), value
    with_quotes = f"{ENV}.{name}='{bad[0]}'"
    (violation,) = violations_of(with_quotes)
    assert (violation.path, violation.value) == (f"{ENV}.{name}", str(bad[0]))
    assert violation.message == f"must be {NPU_VARIABLES[name].values}"


def test_every_known_variable_is_tried() -> None:
    (mark,) = (m for m in test_known_variables_take_values_that_mean_something.pytestmark if m.name == "parametrize")
    assert {name for name, _, _ in mark.args[1]} == set(NPU_VARIABLES)
    assert set(DETERMINISTIC) <= set(NPU_VARIABLES)


@pytest.mark.parametrize(
    ("override", "path", "message"),
    [
        (f"{ENV}.TOKENIZERS_PARALLELISM=true", f"{ENV}.TOKENIZERS_PARALLELISM", "put the text that the variable is"),
        (f"{ENV}.NOTHING=null", f"{ENV}.NOTHING", "should be text or a number"),
        ("runtime_env.env_var={A: 1}", "runtime_env.env_var", "unknown key"),
        (f"{ENV}.RANK=0", f"{ENV}.RANK", "tells a worker its place among the ranks"),
        (f"{ENV}.VLLM_CPU_KVCACHE_SPACE=4", f"{ENV}.VLLM_CPU_KVCACHE_SPACE", "cpu_kv_cache_gib is the key"),
        (
            f"{ENV}.PYTORCH_NPU_ALLOC_CONF='expandable_segments:True'",
            f"{ENV}.PYTORCH_NPU_ALLOC_CONF",
            "refuses expandable segments",
        ),
    ],
)
def test_variables_that_are_refused(override: str, path: str, message: str) -> None:
    (violation,) = violations_of(override)
    assert violation.path == path
    assert message in violation.message


def test_a_name_that_no_variable_can_have() -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"runtime_env": {"env_vars": {"a-b": 1}}})
    (message,) = (found.message for found in caught.value.violations if found.path == f"{ENV}.a-b")
    assert "should match pattern" in message


def test_other_variables_are_the_users() -> None:
    quoted = f"{ENV}.TOKENIZERS_PARALLELISM='true'"
    cfg, _ = load_config(BASE, [quoted, f"{ENV}.HCCL_BUFFSIZE=400", f"{ENV}.VLLM_USE_V1=1"])
    assert cfg.environment == {"TOKENIZERS_PARALLELISM": "true", "HCCL_BUFFSIZE": "400", "VLLM_USE_V1": "1"}
    # on a CPU vLLM has no such pool
    load_config(CPU, [f"{ENV}.PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'"])
    load_config(BASE, [f"{ENV}.VLLM_MLA_DISABLE=1"])
    (violation,) = violations_of(f"{ENV}.VLLM_MLA_DISABLE=0", name=CPU)
    assert violation.message == "the trainer sets it itself with device = 'cpu'"
    undecided = Config(megatron_training=MegatronConfig(), runtime_env={"env_vars": {"HCCL_BUFFSIZE": 400}})
    assert not list(unfit_for(undecided, "npu"))
    (violation,) = unfit_for(undecided, "cpu")
    assert violation.path == f"{ENV}.HCCL_BUFFSIZE"


def test_deterministic_mode_sets_its_variables() -> None:
    deterministic = "megatron_training.npu_deterministic=true"
    cfg, _ = load_config(BASE, [deterministic, f"{ENV}.HCCL_BUFFSIZE=400"])
    assert cfg.environment == {**DETERMINISTIC, "HCCL_BUFFSIZE": "400"}
    assert all(NPU_VARIABLES[name].accepts(value) for name, value in DETERMINISTIC.items())
    (violation,) = violations_of(deterministic, f"{ENV}.LCCL_DETERMINISTIC=0")
    assert violation.path == f"{ENV}.LCCL_DETERMINISTIC"
    assert "npu_deterministic = True sets it to '1'" in violation.message
    load_config(BASE, [f"{ENV}.LCCL_DETERMINISTIC=1"])
