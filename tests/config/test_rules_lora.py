"""Rules on adapters, beyond one example each, and what memory they take."""

import pytest
from violations import BASE, violations_of

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout, has_reference_model
from mindspeed_rl.config.memory import estimate_memory

LORA = "actor_config.lora_r=16"
MODULES = "actor_config.lora_target_modules"


@pytest.mark.parametrize(
    ("modules", "message", "suggestion"),
    [
        ("[]", "names no layer to train", "linear_qkv, linear_proj, linear_fc1, linear_fc2"),
        ("[linear_qkv,linear_qkv]", "names linear_qkv more than once", "name it once"),
        ("[linear_qvk]", "linear_qvk is not a layer that can have an adapter", "did you mean linear_qkv?"),
        ("[up_proj]", "gate_proj, up_proj are linear_fc1", "name linear_fc1"),
        ("[output_layer]", "output_layer is not a layer", "known: linear_qkv"),
    ],
)
def test_modules_are_refused(modules: str, message: str, suggestion: str) -> None:
    (violation,) = violations_of(LORA, f"{MODULES}={modules}")
    assert violation.path == MODULES
    assert message in violation.message
    assert suggestion in (violation.suggestion or "")


@pytest.mark.parametrize(
    ("key", "value"), [("lora_r", "-1"), ("lora_alpha", "0"), ("lora_r", "1.5"), ("lora_r", "true")]
)
def test_values_are_refused(key: str, value: str) -> None:
    (violation,) = violations_of(LORA, f"actor_config.{key}={value}")
    assert violation.path == f"actor_config.{key}"


def test_latent_attention_has_no_adapters() -> None:
    (violation,) = violations_of("actor_config.lora_r=8", name="grpo_trainer_deepseekv3_671b")
    assert (violation.path, violation.value) == ("actor_config.lora_r", 8)
    assert "latent attention of a DeepseekV3ForCausalLM" in violation.message


def test_a_critic_has_the_adapters_of_the_actor() -> None:
    (violation,) = violations_of(LORA, "critic_config.lora_r=8", name="ppo_trainer_qwen25_7b")
    assert (violation.path, violation.value) == ("critic_config.lora_r", 8)
    load_config("ppo_trainer_qwen25_7b", [LORA])


def test_adapters_take_little_memory() -> None:
    """Worked out by hand for TP 4, DP 2: 28 layers, h 3584, f 18944, 28 heads and 4 groups of 128, r 16."""
    full, lora = (load_config(BASE, overrides)[0] for overrides in ([], [LORA]))
    model, layout = resolve_model(full), derive_layout(full)
    of_all, of_adapters = (estimate_memory(cfg, model, layout) for cfg in (full, lora))
    qkv, fc1 = 3584 + 4608 // 4, 3584 + 37888 // 4
    proj, fc2 = 3584 // 4 + 3584, 18944 // 4 + 3584
    count = 28 * 16 * (qkv + fc1 + proj + fc2)
    assert of_adapters.weights == of_all.weights + 2 * count
    assert of_adapters.gradients == 4 * count
    assert of_adapters.optimizer == 12 * count // 2
    assert of_all.reference == of_all.weights
    assert of_adapters.reference == 0
    assert not has_reference_model(lora)
    assert of_adapters.training < of_all.training / 2
    # W, and B A, in float32, the sum in bfloat16, of gate and up
    merged = 3584 * 37888 // 4 * 10
    bucket = int(lora.generate_config.resharding_bucket_mb * 2**20)
    assert of_adapters.buckets == of_all.buckets + merged + bucket
