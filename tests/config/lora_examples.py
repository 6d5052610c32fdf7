"""Examples that break the rules on adapters, as in `test_rules.py`."""

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
LORA_EXAMPLES = {
    "lora_keys_are_used": (
        ["actor_config.lora_alpha=16"],
        "actor_config.lora_alpha", 16.0, "has no effect with lora_r = 0", "set actor_config.lora_r",
    ),
    "lora_modules_are_known": (
        ["actor_config.lora_r=8", "actor_config.lora_target_modules=[q_proj]"],
        "actor_config.lora_target_modules", ["q_proj"],
        "in Megatron q_proj, k_proj, v_proj are linear_qkv, with one adapter", "name linear_qkv",
    ),
    "lora_modules_are_in_the_model": (
        [
            "device_memory_gib=null", "model=qwen3_30b_a3b", "megatron_training.model=qwen3_30b_a3b",
            "actor_config.model=qwen3_30b_a3b", "megatron_training.lora_r=8",
            "megatron_training.lora_target_modules=[linear_qkv,linear_fc1]",
        ],
        "megatron_training.lora_target_modules", ["linear_qkv", "linear_fc1"],
        "linear_fc1: the experts of a Qwen3MoeForCausalLM have no adapters", "name [linear_qkv, linear_proj]",
    ),
}  # fmt: skip
