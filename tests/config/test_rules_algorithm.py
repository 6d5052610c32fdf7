"""Keys of one algorithm that are set with another are refused, each by name."""

import pytest
from algorithm_examples import CLIP_HIGHER, PPO
from violations import BASE, DYNAMIC, violations_of

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout, tokens_may_be_stale
from mindspeed_rl.config.memory import estimate_memory
from mindspeed_rl.config.rules_memory import estimate


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["gamma=0.9"], "gamma", "adv_estimator = 'group_norm'"),
        (["adv_estimator=reinforce_plus_plus", "lam=0.9"], "lam", "adv_estimator = 'reinforce_plus_plus'"),
        (["cliprange_value=0.9"], "cliprange_value", "adv_estimator = 'group_norm'"),
        (["critic_shares_actor=true"], "critic_shares_actor", "adv_estimator = 'group_norm'"),
        (["value_loss_coef=1"], "value_loss_coef", "critic_shares_actor = False"),
        (["critic_warmup=9"], "critic_warmup", "adv_estimator = 'group_norm'"),
        (["critic_forward_micro_batch_size=9"], "critic_forward_micro_batch_size", "adv_estimator = 'group_norm'"),
        (["adv_estimator=rloo", "norm_adv_by_std=false"], "norm_adv_by_std", "adv_estimator = 'rloo'"),
        (["adv_estimator=remax", "norm_adv_by_std=false"], "norm_adv_by_std", "adv_estimator = 'remax'"),
        (["adv_estimator=remax", "gamma=0.9"], "gamma", "adv_estimator = 'remax'"),
        (["loss_type=sapo", "clip_ratio=0.1"], "clip_ratio", "loss_type = 'sapo'"),
        (["loss_type=gspo", "clip_ratio_c=3"], "clip_ratio_c", "loss_type = 'gspo'"),
        (["sapo_tau_pos=2"], "sapo_tau_pos", "loss_type = 'ppo'"),
        (["sapo_tau_neg=2"], "sapo_tau_neg", "loss_type = 'ppo'"),
        (["clip_cov_ratio=0.1"], "clip_cov_ratio", "loss_type = 'ppo'"),
        (["clip_cov_lb=0.1"], "clip_cov_lb", "loss_type = 'ppo'"),
        (["clip_cov_ub=9"], "clip_cov_ub", "loss_type = 'ppo'"),
        (["kl_cov_ratio=0.1"], "kl_cov_ratio", "loss_type = 'ppo'"),
        (["kl_cov_coef=0.1"], "kl_cov_coef", "loss_type = 'ppo'"),
        (["kl_horizon=10"], "kl_horizon", "kl_ctrl_type = 'fixed'"),
        (["clip_ratio_low=0.1"], "clip_ratio_low", "clip_higher_enable = False"),
        (["clip_ratio_high=0.1"], "clip_ratio_high", "clip_higher_enable = False"),
        (["overlong_buffer=64"], "overlong_buffer", "overlong_buffer_enable = False"),
        (["overlong_buffer_penalty_factor=2"], "overlong_buffer_penalty_factor", "overlong_buffer_enable = False"),
        (["filter_groups_metric=acc"], "filter_groups_metric", "filter_groups_enable = False"),
        (["filter_groups_max_batches=2"], "filter_groups_max_batches", "filter_groups_enable = False"),
        (["rollout_is=all", "rollout_is_threshold_lower=0.1"], "rollout_is_threshold_lower", "rollout_is_mode"),
        (["rollout_is=off", "rollout_is_level=sequence"], "rollout_is_level", "weighs no token"),
        (["rollout_is_mode=mask"], "rollout_is_mode", "staleness = 0"),
        (["rollout_is_veto_threshold=0.1"], "rollout_is_veto_threshold", "staleness = 0"),
        (["recompute_logprobs=false", "rollout_is=all"], "rollout_is", "the policy ratio holds already"),
        (["recompute_logprobs=false", "rollout_is_mode=mask"], "rollout_is_mode", "staleness = 0"),
        (["recompute_logprobs=false", "rollout_is_threshold=3"], "rollout_is_threshold", "the policy ratio is the"),
        (["use_kl_in_reward=true", "init_kl_coef=0"], "use_kl_in_reward", "no effect with init_kl_coef"),
        (["kl_penalty=k4"], "kl_penalty", "is unknown"),
        (["kl_penalty=full+"], "kl_penalty", "the gradient of full is exact"),
        (["kl_penalty=full+", "use_kl_in_reward=true"], "kl_penalty", "the gradient of full is exact"),
        (["kl_penalty=full"], "ref_forward_micro_batch_size", "passes are those of the update"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_keys_of_another_algorithm_are_refused(overrides, key, message):
    (violation,) = violations_of(*(f"rl_config.{override}" for override in overrides))
    assert violation.path == f"rl_config.{key}"
    assert message in violation.message


def test_clip_bounds_replace_the_clip_ratio():
    (violation,) = violations_of(*CLIP_HIGHER, "rl_config.clip_ratio=0.3")
    assert (violation.path, violation.value) == ("rl_config.clip_ratio", 0.3)


def test_the_overlong_buffer_is_no_longer_than_a_response():
    enable = "rl_config.overlong_buffer_enable=true"
    (violation,) = violations_of(enable, "rl_config.overlong_buffer=100000")
    assert violation.path == "rl_config.overlong_buffer"
    assert "max_tokens" in violation.message


def test_a_critic_has_limits_of_its_own():
    (violation,) = violations_of(*PPO, "critic_config.lr=1e-9", "actor_config.min_lr=1e-7")
    assert (violation.path, violation.value) == ("critic_config.min_lr", 1e-7)
    own = ["rl_config.custom_algorithm_file=mine.py", "rl_config.adv_estimator=mine", "rl_config.critic_warmup=5"]
    (violation,) = violations_of(*own)
    assert violation.path == "rl_config.critic_warmup"
    (violation,) = violations_of(*PPO, *DYNAMIC, "critic_config.micro_batch_size=2")
    assert (violation.path, violation.value) == ("critic_config.micro_batch_size", 2)
    fits = load_config(BASE, ["device_memory_gib=60"])[0]
    assert fits.rl_config.adv_estimator == "group_norm"
    (violation,) = violations_of(*PPO, "device_memory_gib=60", "actor_config.use_distributed_optimizer=false")
    assert "critic" in violation.message


def test_a_shared_critic_has_nothing_of_its_own():
    shared = [*PPO, "rl_config.critic_shares_actor=true"]
    (violation,) = violations_of(*shared, "rl_config.critic_forward_micro_batch_size=4")
    assert violation.path == "rl_config.critic_forward_micro_batch_size"
    assert "actor_forward_micro_batch_size" in violation.message
    for key, value in {"lr": 1e-5, "load": "folder", "micro_batch_size": 1}.items():
        (violation,) = violations_of(*shared, f"critic_config.{key}={value}")
        assert (violation.path, violation.value) == (f"critic_config.{key}", value)
        assert f"~critic_config.{key}" in violation.suggestion
    (cfg, _), (plain, _) = load_config(BASE, shared), load_config(BASE)
    assert estimate(cfg, resolve_model(cfg)) == estimate(plain, resolve_model(plain))


def test_a_critic_needs_its_stage_and_a_stage_its_critic():
    (violation,) = violations_of("megatron_training.stage=ray_ppo")
    assert (violation.path, violation.value) == ("rl_config.adv_estimator", "group_norm")
    assert "adv_estimator: gae" in violation.suggestion
    (violation,) = violations_of("critic_config.lr=1e-5")
    assert violation.path == "critic_config.lr"
    assert "has no critic" in violation.message


def test_a_critic_and_a_greedy_baseline_exclude_each_other():
    (violation,) = violations_of("megatron_training.stage=ray_ppo", "rl_config.adv_estimator=remax")
    assert (violation.path, violation.value) == ("rl_config.adv_estimator", "remax")


def test_greedy_responses_take_room_in_the_cache():
    """One beside the 4 samples of each prompt; of them all, 256 run at once in an engine."""
    full = []
    for estimator in ("rloo", "remax"):
        sizes = ["rl_config.n_samples_per_prompt=4", "generate_config.max_num_seqs=256"]
        cfg, _ = load_config(BASE, [f"rl_config.adv_estimator={estimator}", *sizes])
        layout = derive_layout(cfg)
        assert layout.rows_in_generation // layout.rollout_replicas < 200
        full.append(estimate_memory(cfg, resolve_model(cfg), layout).kv_full)
    assert full[1] * 4 == full[0] * 5


def test_filtered_groups_are_carried_to_the_next_iteration_which_must_not_have_begun():
    separate = ["rl_config.use_integrated_worker=false", "rl_config.rollout_resource={num_npus: 4}"]
    kept = [
        f"generate_config.offload_{p}=false" for p in ("train_optimizer", "train_grad", "train_param", "reference")
    ]
    enable = ["rl_config.filter_groups_enable=true", "rl_config.staleness=1", "rl_config.blocking=false"]
    (violation,) = violations_of(*separate, *kept, *enable)
    assert violation.path == "rl_config.filter_groups_enable"
    assert "staleness = 1" in violation.message


def test_surplus_groups_are_of_an_older_policy():
    """So their versions and log-probs are kept, and importance weights shape their losses."""
    enable = ["rl_config.filter_groups_enable=true", "rl_config.filter_groups_metric=acc"]
    verifiers = ["rl_config.verifier_function=[acc,format]", "rl_config.verifier_weight=[1.0,0.5]"]
    cfg, _ = load_config(BASE, [*enable, *verifiers, "rl_config.rollout_is_level=sequence"])
    assert tokens_may_be_stale(cfg)
    (violation,) = violations_of(*enable, *verifiers, "generate_config.sampling_config.logprobs=false")
    assert violation.path == "rl_config.rollout_is"
