"""Examples that break the rules on mixtures of experts, as in `test_rules.py`."""

# 128 experts instead of one MLP, on 8 devices with TP 4 and DP 2
EXPERTS = [
    "device_memory_gib=null",
    "model=qwen3_30b_a3b",
    "megatron_training.model=qwen3_30b_a3b",
    "actor_config.model=qwen3_30b_a3b",
]

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
EXPERT_EXAMPLES = {
    "expert_parallel_divides_experts": (
        [*EXPERTS, "actor_config.expert_model_parallel_size=3"],
        "actor_config.expert_model_parallel_size", 3, "the model's num_moe_experts = 128", "possible: 1, 2, 4",
    ),
    "expert_parallel_divides_data_and_context_parallel": (
        ["actor_config.expert_model_parallel_size=4"],
        "actor_config.expert_model_parallel_size", 4, "devices / (TP x PP) = 2", "possible: 1, 2",
    ),
    "experts_need_sequence_parallel": (
        [*EXPERTS, "megatron_training.sequence_parallel=false"],
        "megatron_training.sequence_parallel", False, "tensor_model_parallel_size = 4 needs it", "set it to true",
    ),
    "rollout_expert_parallel_size_is_that_of_the_engine": (
        [*EXPERTS, "generate_config.enable_expert_parallel=true", "generate_config.infer_expert_parallel_size=2"],
        "generate_config.infer_expert_parallel_size", 2, "infer_tensor_parallel_size = 4", "set it to 4",
    ),
    "rollout_expert_parallel_needs_experts": (
        ["generate_config.enable_expert_parallel=true"],
        "generate_config.enable_expert_parallel", True, "Qwen2ForCausalLM has no experts", "set it to false",
    ),
    "rollout_expert_parallel_runs_on_device": (
        [*EXPERTS, "device=cpu", "generate_config.enable_expert_parallel=true"],
        "generate_config.enable_expert_parallel", True, "device = 'cpu'", "tensor parallelism",
    ),
}  # fmt: skip
