"""Examples that break the rules on kernels, MindSpeed and environment variables, as in `test_rules.py`."""

ENV = "runtime_env.env_vars"

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
ASCEND_EXAMPLES = {
    "kernels_are_there": (
        ["megatron_training.use_flash_attn=false"],
        "megatron_training.use_flash_attn", False, "device = 'npu' has no other way", "remove it",
    ),
    "npu_keys_are_for_npus": (
        ["device=cuda", "megatron_training.npu_deterministic=true"],
        "megatron_training.npu_deterministic", True, "no effect with device = 'cuda'", "set it to false",
    ),
    "vllm_ascend_keys_are_for_npus": (
        ["device=cuda", "generate_config.ascend_scheduler=true"],
        "generate_config.ascend_scheduler", True, "no effect with device = 'cuda'", "set it to false",
    ),
    "torchair_makes_graphs": (
        ["generate_config.torchair_graph=true", "generate_config.enforce_eager=true"],
        "generate_config.torchair_graph", True, "enforce_eager = True none", "enforce_eager: false",
    ),
    "torchair_knows_the_model": (
        ["generate_config.torchair_graph=true", "generate_config.enforce_eager=false"],
        "generate_config.torchair_graph", True, "not for Qwen2ForCausalLM", "ACL graphs",
    ),
    "features_go_together": (
        ["actor_config.moe_tp_extend_ep=true"],
        "actor_config.moe_tp_extend_ep", True, "checkpoints read a slice of each", "expert_model_parallel_size",
    ),
    "activations_are_not_recomputed_twice": (
        ["actor_config.recompute_activation_function=true", "megatron_training.recompute_num_layers=28"],
        "actor_config.recompute_activation_function", True, "recomputes all layers", "fewer recompute_num_layers",
    ),
    "variables_have_values_that_mean_something": (
        [f"{ENV}.HCCL_CONNECT_TIMEOUT=60"],
        f"{ENV}.HCCL_CONNECT_TIMEOUT", "60", "must be whole number from 120 to 7200", "seconds that ranks wait",
    ),
    "variables_are_not_the_trainers": (
        [f"{ENV}.CUDA_DEVICE_MAX_CONNECTIONS=1"],
        f"{ENV}.CUDA_DEVICE_MAX_CONNECTIONS", "1", "the trainer sets it itself: Megatron", "remove it",
    ),
    "variables_act_on_device": (
        ["device=cuda", f"{ENV}.TASK_QUEUE_ENABLE=2"],
        f"{ENV}.TASK_QUEUE_ENABLE", "2", "device = 'cuda': only NPUs read it", "remove it",
    ),
}  # fmt: skip
