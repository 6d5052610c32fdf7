"""Examples that break the rules on algorithms, as in `test_rules.py`."""

PPO = ["megatron_training.stage=ray_ppo", "rl_config.adv_estimator=gae"]
CLIP_HIGHER = [
    "rl_config.clip_higher_enable=true",
    "rl_config.clip_ratio_low=0.2",
    "rl_config.clip_ratio_high=0.28",
]
# rule -> (overrides, key path, value, part of the message, part of the suggestion)
# fmt: off
ALGORITHM_EXAMPLES = {
    "algorithms_are_known": (
        ["rl_config.loss_type=gpso"],
        "rl_config.loss_type", "gpso", "is unknown", "did you mean gspo?",
    ),
    "custom_algorithms_are_chosen": (
        ["rl_config.custom_algorithm_file=mine.py"],
        "rl_config.custom_algorithm_file", "mine.py", "all name algorithms of ours", "remove the file",
    ),
    "early_stop_can_happen": (
        ["rl_config.early_stop_imp_ratio=1.5", "rl_config.mini_batch_size=64"],
        "rl_config.early_stop_imp_ratio", 1.5, "all ratios are 1", "epochs above 1",
    ),
    "kl_penalty_is_used": (
        ["rl_config.kl_penalty=k1", "rl_config.init_kl_coef=0"],
        "rl_config.kl_penalty", "k1", "init_kl_coef = 0.0", "leave it at low_var_kl",
    ),
    "algorithm_keys_are_used": (
        ["rl_config.kl_target=0.05"],
        "rl_config.kl_target", 0.05, "kl_ctrl_type = 'fixed'", "set kl_ctrl_type to adaptive",
    ),
    "clip_bounds_are_given_once": (
        ["rl_config.clip_higher_enable=true", "rl_config.clip_ratio_low=0.2"],
        "rl_config.clip_ratio_high", None, "needed by clip_higher_enable", "0.28",
    ),
    "covariance_bounds_are_ordered": (
        ["rl_config.loss_type=clip_cov", "rl_config.clip_cov_lb=5"],
        "rl_config.clip_cov_lb", 5.0, "below clip_cov_ub = 5.0", "",
    ),
    "kl_in_reward_has_a_weight_and_no_gradient": (
        ["rl_config.use_kl_in_reward=true", "rl_config.kl_penalty=k1+"],
        "rl_config.kl_penalty", "k1+", "gradient of a loss", "set k1",
    ),
    "full_kl_is_a_loss": (
        ["rl_config.kl_penalty=full", "~rl_config.ref_forward_micro_batch_size", "rl_config.use_kl_in_reward=true"],
        "rl_config.kl_penalty", "full", "of whole distributions", "use_kl_in_reward: false",
    ),
    "correction_has_log_probs": (
        ["rl_config.rollout_is=all", "generate_config.sampling_config.logprobs=false"],
        "rl_config.rollout_is", "all", "logprobs = False", "set logprobs: true",
    ),
    "correction_keys_are_used": (
        ["rl_config.rollout_is_threshold=3"],
        "rl_config.rollout_is_threshold", 3.0, "staleness = 0", "rollout_is: all",
    ),
    "stage_has_its_critic": (
        ["rl_config.adv_estimator=gae"],
        "rl_config.adv_estimator", "gae", "has no critic", "set stage: ray_ppo",
    ),
    "critic_keys_are_its_own": (
        [*PPO, "+critic_config.tensor_model_parallel_size=2"],
        "critic_config.tensor_model_parallel_size", 2, "shares the actor's devices", "possible keys: load",
    ),
    "shared_critic_goes_with_the_actor": (
        [*PPO, "rl_config.critic_shares_actor=true", "rl_config.critic_warmup=2"],
        "rl_config.critic_warmup", 2, "one optimizer step for both", "leave it at 0",
    ),
    "warm_up_ends": (
        [*PPO, "rl_config.critic_warmup=500"],
        "rl_config.critic_warmup", 500, "train_iters = 500", "",
    ),
    "adaptive_kl_stays_positive": (
        ["rl_config.kl_ctrl_type=adaptive", "rl_config.kl_horizon=100"],
        "rl_config.kl_horizon", 100.0, "could become negative", "for example",
    ),
    "groups_can_be_compared": (
        ["rl_config.adv_estimator=gpg", "rl_config.n_samples_per_prompt=1"],
        "rl_config.n_samples_per_prompt", 1, "all advantages are 0", "2 or more",
    ),
    "overlong_buffer_fits": (
        ["rl_config.overlong_buffer_enable=true"],
        "rl_config.overlong_buffer", None, "needed by overlong_buffer_enable", "a quarter of max_tokens",
    ),
}
