"""Stages without rollout: which keys they read, and what is still looked at."""

import pytest
from violations import violations_of

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.layout import derive_layout

SFT, DPO = "sft_tiny_cpu", "dpo_tiny_cpu"


@pytest.mark.parametrize(
    ("name", "overrides", "path", "message"),
    [
        (SFT, ["generate_config.max_model_len=32"], "generate_config.max_model_len", "no effect with stage = 'sft'"),
        (SFT, ["critic_config.lr=1e-3"], "critic_config.lr", "no effect with stage = 'sft'"),
        (SFT, ["dpo_config.beta=0.2"], "dpo_config.beta", "no effect with stage = 'sft'"),
        (DPO, ["sft_config.messages_key=m"], "sft_config.messages_key", "no effect with stage = 'dpo'"),
        (DPO, ["rl_config.verifier_function=[acc]"], "rl_config.verifier_function", "no effect with stage = 'dpo'"),
        ("grpo_trainer_tiny_cpu", ["dpo_config.beta=0.2"], "dpo_config.beta", "no effect with stage = 'ray_grpo'"),
        (SFT, ["profiler.steps=[1]", "profiler.what=[rollout]"], "profiler.what", "no effect with stage = 'sft'"),
        (SFT, ["rl_config.max_packing_token_size=64"], "rl_config.max_packing_token_size", "use_dynamic_bsz"),
        (SFT, ["rl_config.use_dynamic_bsz=true", "rl_config.max_packing_token_size=64"],
         "actor_config.micro_batch_size", "has no effect: use_dynamic_bsz"),
        (SFT, ["rl_config.actor_resource.num_npus=3", "actor_config.tensor_model_parallel_size=2"],
         "rl_config.actor_resource.num_npus", "TP x CP x PP"),
        (SFT, ["megatron_training.data_path=null"], "megatron_training.data_path", "required"),
        (SFT, ["rl_config.test_freq=5"], "rl_config.test_freq", "val_data_path"),
        (SFT, ["actor_config.lr_wsd_decay_fraction=0.1"], "actor_config.lr_wsd_decay_fraction", "is of lr_decay"),
        (SFT, ["actor_config.lr_decay_style=WSD", "actor_config.lr_wsd_decay_fraction=0.97"],
         "actor_config.lr_wsd_decay_fraction", "more than all steps"),
        (SFT, ["actor_config.min_lr=1"], "actor_config.min_lr", "is larger than actor_config.lr"),
        (SFT, ["actor_config.bf16=true"], "actor_config.bf16", "float32 only"),
        (SFT, ["actor_config.npu_deterministic=true"], "actor_config.npu_deterministic", "no effect with device"),
        (SFT, ["profiler.steps=[1]", "profiler.ranks=[2]"], "profiler.ranks", "there are 2 workers"),
        (SFT, ["megatron_training.val_max_samples=4"], "megatron_training.val_max_samples", "without val_data_path"),
        (DPO, ["megatron_training.answer_key=a"], "megatron_training.answer_key", "no effect with stage = 'dpo'"),
        (SFT, ["sft_config.messages_key=m", "actor_config.prompt_key=p", "actor_config.apply_chat_template=true"],
         "actor_config.prompt_key", "no effect with sft_config.messages_key"),
        (SFT, ["device_memory_gib=0.005"], "device_memory_gib", "an update takes"),
    ],
)  # fmt: skip
def test_refused(name: str, overrides: list[str], path: str, message: str) -> None:
    (found,) = violations_of(*overrides, name=name)
    assert found.path == path
    assert message in found.message


def test_a_plan_that_does_not_fit_is_not_told_of_rollouts_keys() -> None:
    (found,) = violations_of("device_memory_gib=0.005", name=SFT)
    assert "generate_config" not in str(found.suggestion)
    assert "micro_batch_size: 8" in str(found.suggestion)


def test_an_iteration_is_an_optimizer_step() -> None:
    sft, dpo = (derive_layout(load_config(name, [])[0]) for name in (SFT, DPO))
    assert (sft.sequences_per_iteration, sft.total_optimizer_steps, sft.micro_batches) == (32, 200, 1)
    assert (dpo.sequences_per_iteration, dpo.total_optimizer_steps, dpo.micro_batches) == (64, 60, 2)
