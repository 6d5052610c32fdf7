"""Examples that break the rules on validation, as in `test_rules.py`."""

DATA = "megatron_training.val_data_path=val.jsonl"
SAMPLING = "generate_config.val_sampling_config"

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
VALIDATION_EXAMPLES = {
    "validation_has_data_and_a_time": (
        [DATA],
        "megatron_training.val_data_path", "val.jsonl", "neither rl_config.test_freq nor", "set one of these",
    ),
    "validation_samples_are_used": (
        ["megatron_training.val_max_samples=4"],
        "megatron_training.val_max_samples", 4, "no effect without val_data_path", "remove it",
    ),
    "validation_keys_are_used": (
        [f"{SAMPLING}.temperature=0.6"],
        f"{SAMPLING}.temperature", 0.6, "no effect without val_data_path", "remove it",
    ),
    "validation_goes_by_what_is_scored": (
        [DATA, "rl_config.test_freq=5", "rl_config.val_metric=math_verfy"],
        "rl_config.val_metric", "math_verfy", "nor in verifier_function", "did you mean math_verify?",
    ),
    "validation_finds_engines_idle": (
        [
            DATA, "rl_config.test_freq=5", "rl_config.staleness=1", "rl_config.use_integrated_worker=false",
            "rl_config.rollout_resource={num_npus: 4}",
            *(f"generate_config.offload_{part}=false" for part in (
                "train_optimizer", "train_grad", "train_param", "reference"
            )),
        ],
        "rl_config.test_freq", 5, "no time for it with staleness = 1", "cli/evaluate.py",
    ),
    "validation_responses_fit_and_differ": (
        [DATA, "rl_config.test_freq=5", f"{SAMPLING}.n=4"],
        f"{SAMPLING}.n", 4, "all be the same", "above 0",
    ),
}  # fmt: skip
