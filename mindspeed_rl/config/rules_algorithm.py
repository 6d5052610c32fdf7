"""Rules about what is trained for: advantages, losses, KL, correction of the rollout's policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.algorithm import ADV_ESTIMATORS, FULL_KL, KL_PENALTIES, LOSS_TYPES
from mindspeed_rl.config.layout import shares_critic, tokens_may_be_stale, updates_differ_from_samples, uses_critic
from mindspeed_rl.config.rule import RESPONSE_KEYS, Found, nearest, response_key, rule
from mindspeed_rl.config.schema import Config, RLConfig

MAX_RELATIVE_ERROR = 0.2  # of the adaptive KL controller
_CLIPPING = ("ppo", "gspo", "cispo", "gmpo", "clip_cov")
_WITH_CRITIC = ("gae",)
# key -> the key that gives it a meaning, and the values with which it has one
_KEY_OF: dict[str, tuple[str, tuple[Any, ...]]] = {
    "norm_adv_by_std": ("adv_estimator", ("group_norm", "grpo", "grpo_passk")),
    "gamma": ("adv_estimator", ("reinforce_plus_plus", "gae")),
    "lam": ("adv_estimator", _WITH_CRITIC),
    "cliprange_value": ("adv_estimator", _WITH_CRITIC),
    "critic_warmup": ("adv_estimator", _WITH_CRITIC),
    "critic_forward_micro_batch_size": ("adv_estimator", _WITH_CRITIC),
    "critic_shares_actor": ("adv_estimator", _WITH_CRITIC),
    "value_loss_coef": ("critic_shares_actor", (True,)),
    "clip_ratio": ("loss_type", _CLIPPING),
    "clip_higher_enable": ("loss_type", _CLIPPING),
    "clip_ratio_c": ("loss_type", ("ppo",)),
    "sapo_tau_pos": ("loss_type", ("sapo",)),
    "sapo_tau_neg": ("loss_type", ("sapo",)),
    "clip_cov_ratio": ("loss_type", ("clip_cov",)),
    "clip_cov_lb": ("loss_type", ("clip_cov",)),
    "clip_cov_ub": ("loss_type", ("clip_cov",)),
    "kl_cov_ratio": ("loss_type", ("kl_cov",)),
    "kl_cov_coef": ("loss_type", ("kl_cov",)),
    "kl_target": ("kl_ctrl_type", ("adaptive",)),
    "kl_horizon": ("kl_ctrl_type", ("adaptive",)),
    "rollout_is_threshold_lower": ("rollout_is_mode", ("mask",)),
    "clip_ratio_low": ("clip_higher_enable", (True,)),
    "clip_ratio_high": ("clip_higher_enable", (True,)),
    "overlong_buffer": ("overlong_buffer_enable", (True,)),
    "overlong_buffer_penalty_factor": ("overlong_buffer_enable", (True,)),
    "filter_groups_metric": ("filter_groups_enable", (True,)),
    "filter_groups_max_batches": ("filter_groups_enable", (True,)),
}
CRITIC_KEYS = (
    "load",
    "micro_batch_size",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_fraction",
    "weight_decay",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
)
_NAMES: Mapping[str, tuple[str, ...]] = {
    "adv_estimator": ADV_ESTIMATORS,
    "loss_type": LOSS_TYPES,
    "kl_penalty": tuple(f"{name}{mark}" for mark in ("", "+") for name in (*KL_PENALTIES, FULL_KL)),
}
_CORRECTION = tuple(
    f"rollout_is_{key}" for key in ("level", "mode", "threshold", "threshold_lower", "veto_threshold")
)
_STALE = tuple(
    f"rl_config.{key}" for key in ("rollout_is", "staleness", "partial_rollout_max_split", "filter_groups_enable")
)
_LOGPROBS = "generate_config.sampling_config.logprobs"


def _changed(rl: RLConfig, key: str) -> bool:
    return bool(getattr(rl, key) != RLConfig.model_fields[key].default)


@rule("rl_config.custom_algorithm_file", *(f"rl_config.{key}" for key in _NAMES))
def algorithms_are_known(cfg: Config) -> Found:
    """A user's file may register other names: they are looked for when it is loaded, before any worker starts."""
    for key, names in _NAMES.items():
        name = getattr(cfg.rl_config, key)
        if name not in names and cfg.rl_config.custom_algorithm_file is None:
            hint = f"{nearest(name, names)} Names of your own need custom_algorithm_file"
            yield Violation(f"rl_config.{key}", name, "is unknown", hint)


@rule("rl_config.custom_algorithm_file", *(f"rl_config.{key}" for key in _NAMES))
def custom_algorithms_are_chosen(cfg: Config) -> Found:
    path = cfg.rl_config.custom_algorithm_file
    if path is not None and all(getattr(cfg.rl_config, key) in names for key, names in _NAMES.items()):
        message = f"has no effect: {', '.join(_NAMES)} all name algorithms of ours"
        yield Violation("rl_config.custom_algorithm_file", path, message, "name one of your own, or remove the file")


@rule(*(f"rl_config.{key}" for key in _KEY_OF), *{f"rl_config.{chooser}" for chooser, _ in _KEY_OF.values()})
def algorithm_keys_are_used(cfg: Config) -> Found:
    """What a user's own estimator or loss reads is not known here: it may be any key."""
    rl = cfg.rl_config
    for key, (chooser, values) in _KEY_OF.items():
        chosen = getattr(rl, chooser)
        is_own = chooser in _NAMES and chosen not in _NAMES[chooser] and values != _WITH_CRITIC
        if chosen not in values and not is_own and _changed(rl, key):
            possible = f"set {chooser} to {' or '.join(map(_text, values))}, or "
            default = _text(RLConfig.model_fields[key].default)
            message = f"has no effect with {chooser} = {chosen!r}"
            yield Violation(f"rl_config.{key}", getattr(rl, key), message, f"{possible}leave it at {default}")


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@rule("rl_config.clip_higher_enable", "rl_config.clip_ratio_low", "rl_config.clip_ratio_high", "rl_config.clip_ratio")
def clip_bounds_are_given_once(cfg: Config) -> Found:
    rl = cfg.rl_config
    if not rl.clip_higher_enable:
        return
    for key in ("clip_ratio_low", "clip_ratio_high"):
        if getattr(rl, key) is None:
            hint = "for example clip_ratio_low: 0.2, clip_ratio_high: 0.28 (DAPO)"
            yield Violation(f"rl_config.{key}", None, "is needed by clip_higher_enable = True", hint)
    if _changed(rl, "clip_ratio"):
        message = "has no effect with clip_higher_enable = True"
        yield Violation("rl_config.clip_ratio", rl.clip_ratio, message, "remove it")


@rule("rl_config.clip_cov_lb", "rl_config.clip_cov_ub")
def covariance_bounds_are_ordered(cfg: Config) -> Found:
    rl = cfg.rl_config
    if rl.clip_cov_lb >= rl.clip_cov_ub:
        message = f"must be below clip_cov_ub = {rl.clip_cov_ub}"
        yield Violation("rl_config.clip_cov_lb", rl.clip_cov_lb, message)


@rule("rl_config.early_stop_imp_ratio", "rl_config.epochs", "rl_config.mini_batch_size")
def early_stop_can_happen(cfg: Config) -> Found:
    limit = cfg.rl_config.early_stop_imp_ratio
    if limit is not None and not updates_differ_from_samples(cfg):
        message = (
            "has no effect: the only update of an iteration starts from the policy that sampled, all ratios are 1"
        )
        hint = "set mini_batch_size below global_batch_size, or epochs above 1"
        yield Violation("rl_config.early_stop_imp_ratio", limit, message, hint)


@rule("rl_config.kl_penalty", "rl_config.init_kl_coef")
def kl_penalty_is_used(cfg: Config) -> Found:
    rl = cfg.rl_config
    if rl.init_kl_coef == 0 and _changed(rl, "kl_penalty"):
        hint = f"set a positive init_kl_coef, or leave it at {RLConfig.model_fields['kl_penalty'].default}"
        yield Violation("rl_config.kl_penalty", rl.kl_penalty, "has no effect with init_kl_coef = 0.0", hint)


@rule("rl_config.kl_ctrl_type", "rl_config.init_kl_coef")
def adaptive_kl_starts_above_zero(cfg: Config) -> Found:
    """The controller multiplies the coefficient: from 0 it never leaves 0."""
    if cfg.rl_config.kl_ctrl_type == "adaptive" and cfg.rl_config.init_kl_coef == 0:
        hint = "set a positive init_kl_coef, or kl_ctrl_type: fixed"
        yield Violation("rl_config.init_kl_coef", 0.0, "kl_ctrl_type = 'adaptive' scales it, and 0 stays 0", hint)


@rule("rl_config.kl_ctrl_type", "rl_config.kl_horizon", "rl_config.n_samples_per_prompt", "actor.global_batch_size")
def adaptive_kl_stays_positive(cfg: Config) -> Found:
    """An iteration may take off a fifth of the coefficient for every horizon that it is long."""
    rl, sequences = cfg.rl_config, cfg.actor.global_batch_size * cfg.rl_config.n_samples_per_prompt
    if rl.kl_ctrl_type == "adaptive" and rl.kl_horizon <= MAX_RELATIVE_ERROR * sequences:
        message = f"is too short for {sequences} sequences an iteration: the coefficient could become negative"
        yield Violation("rl_config.kl_horizon", rl.kl_horizon, message, f"for example {10 * sequences}")


@rule("rl_config.adv_estimator", "rl_config.n_samples_per_prompt")
def groups_can_be_compared(cfg: Config) -> Found:
    rl, path = cfg.rl_config, "rl_config.n_samples_per_prompt"
    if rl.adv_estimator in ("gpg", "grpo_passk") and rl.n_samples_per_prompt == 1:
        message = f"adv_estimator = {rl.adv_estimator!r} compares responses to the same prompt: all advantages are 0"
        yield Violation(path, 1, message, "set 2 or more")


@rule("rl_config.use_kl_in_reward", "rl_config.init_kl_coef", "rl_config.kl_penalty")
def kl_in_reward_has_a_weight_and_no_gradient(cfg: Config) -> Found:
    rl = cfg.rl_config
    if not rl.use_kl_in_reward:
        return
    if rl.init_kl_coef == 0:
        hint = "set a positive init_kl_coef, or use_kl_in_reward: false"
        yield Violation("rl_config.use_kl_in_reward", True, "has no effect with init_kl_coef = 0.0", hint)
    if rl.kl_penalty.endswith("+") and rl.kl_penalty != f"{FULL_KL}+":  # refused in any case
        message = "is about the gradient of a loss, and use_kl_in_reward = True puts KL into rewards"
        yield Violation("rl_config.kl_penalty", rl.kl_penalty, message, f"set {rl.kl_penalty[:-1]}")


@rule("rl_config.kl_penalty", "rl_config.use_kl_in_reward", "rl_config.ref_forward_micro_batch_size")
def full_kl_is_a_loss(cfg: Config) -> Found:
    rl, path = cfg.rl_config, "rl_config.kl_penalty"
    if rl.kl_penalty == f"{FULL_KL}+":
        yield Violation(path, rl.kl_penalty, "is about estimators: the gradient of full is exact", f"set {FULL_KL}")
    if rl.kl_penalty != FULL_KL:
        return
    if rl.use_kl_in_reward:
        message = (
            "is the KL of whole distributions, which the update computes for its gradient; with use_kl_in_reward = "
            "True rewards come before it, and are of the tokens that were sampled"
        )
        yield Violation(path, rl.kl_penalty, message, "set use_kl_in_reward: false, or kl_penalty: k1")
    key = "ref_forward_micro_batch_size"
    if _changed(rl, key):
        message = f"has no effect with kl_penalty = {FULL_KL!r}: the reference's passes are those of the update"
        default = RLConfig.model_fields[key].default
        yield Violation(f"rl_config.{key}", getattr(rl, key), message, f"leave it at {default}")


# ---------------------------------------------------------------- critic


@rule("actor.stage", "rl_config.adv_estimator")
def stage_has_its_critic(cfg: Config) -> Found:
    stage, estimator = cfg.actor.stage, cfg.rl_config.adv_estimator
    if (stage == "ray_ppo") != uses_critic(cfg):
        message = (
            f"stage = {stage!r} {'has a critic, for gae' if stage == 'ray_ppo' else 'has no critic, as gae needs'}"
        )
        hint = "set adv_estimator: gae, or stage: ray_grpo" if stage == "ray_ppo" else "set stage: ray_ppo"
        yield Violation("rl_config.adv_estimator", estimator, message, hint)


@rule("rl_config.critic_warmup", "actor.train_iters")
def warm_up_ends(cfg: Config) -> Found:
    warm_up, iterations = cfg.rl_config.critic_warmup, cfg.actor.train_iters
    if warm_up >= iterations and warm_up:
        message = f"is no less than train_iters = {iterations}: the actor would never train"
        yield Violation("rl_config.critic_warmup", warm_up, message)


@rule("rl_config.critic_shares_actor", "rl_config.critic_warmup", "rl_config.critic_forward_micro_batch_size")
def shared_critic_goes_with_the_actor(cfg: Config) -> Found:
    if not shares_critic(cfg):
        return
    why = {
        "critic_warmup": "the critic cannot train alone: critic_shares_actor = True has one optimizer step for both",
        "critic_forward_micro_batch_size": "has no effect with critic_shares_actor = True: values come from the pass "
        "of old log-probs, actor_forward_micro_batch_size",
    }
    for key, message in why.items():
        if _changed(cfg.rl_config, key):
            default = RLConfig.model_fields[key].default
            hint = f"leave it at {default}, or set critic_shares_actor: false"
            yield Violation(f"rl_config.{key}", getattr(cfg.rl_config, key), message, hint)


@rule("critic_config", "actor.stage", "rl_config.critic_shares_actor")
def critic_keys_are_its_own(cfg: Config) -> Found:
    """It shares devices, layout and precision with the actor; so much may differ. A head on the actor has no keys."""
    for key in sorted(cfg.critic_config.model_fields_set):
        path, value = f"critic_config.{key}", getattr(cfg.critic_config, key)
        if cfg.actor.stage != "ray_ppo":
            yield Violation(
                path, value, f"stage = {cfg.actor.stage!r} has no critic", "set stage: ray_ppo, or remove it"
            )
        elif shares_critic(cfg):
            message = "has no effect: with critic_shares_actor = True the critic is part of the actor"
            yield Violation(path, value, message, f"remove it (on the command line: ~{path})")
        elif key not in CRITIC_KEYS and value != getattr(cfg.actor, key):
            message = f"the critic shares the actor's devices, and has {getattr(cfg.actor, key)!r}"
            yield Violation(path, value, message, f"possible keys: {', '.join(CRITIC_KEYS)}")


# ---------------------------------------------------------------- the rollout's policy


@rule(*_STALE, "rl_config.recompute_logprobs", _LOGPROBS)
def correction_has_log_probs(cfg: Config) -> Found:
    rl, logprobs = cfg.rl_config, cfg.generate_config.sampling_config.logprobs
    if not rl.recompute_logprobs and not logprobs:
        message = f"takes the log-probs of rollout, but sampling_config.logprobs = {logprobs!r}"
        yield Violation("rl_config.recompute_logprobs", False, message, "set logprobs: true")
    if not rl.recompute_logprobs and rl.rollout_is == "all" and rl.rollout_is_mode != "mask":
        message = "weighs tokens by what the policy ratio holds already with recompute_logprobs = False"
        yield Violation(
            "rl_config.rollout_is", rl.rollout_is, message, "set rollout_is: off, or rollout_is_mode: mask"
        )
    if not logprobs and _corrects(cfg):
        message = f"weighs tokens by their log-probs in rollout, but sampling_config.logprobs = {logprobs!r}"
        yield Violation("rl_config.rollout_is", rl.rollout_is, message, "set logprobs: true, or rollout_is: off")


@rule(*(f"rl_config.{key}" for key in _CORRECTION), *_STALE, "rl_config.recompute_logprobs")
def correction_keys_are_used(cfg: Config) -> Found:
    rl = cfg.rl_config
    if _corrects(cfg):
        return
    unused = {
        "off": "weighs no token",
        "stale": "weighs tokens of older policies, and staleness = 0, partial_rollout_max_split = 1, "
        "filter_groups_enable = False",
    }
    why, hint = unused.get(rl.rollout_is, ""), "set rollout_is: all, or remove it"
    if not rl.recompute_logprobs and rl.rollout_is_mode != "mask":
        why = "has no effect with recompute_logprobs = False: the policy ratio is the weight"
        hint = "set rollout_is_mode: mask (and rollout_is: all), or remove it"
    for key in _CORRECTION:
        if _changed(rl, key):
            message = f"shapes importance weights, but rollout_is = {rl.rollout_is!r} {why}"
            yield Violation(f"rl_config.{key}", getattr(rl, key), message, hint)


def _corrects(cfg: Config) -> bool:
    rl = cfg.rl_config
    chosen = rl.rollout_is == "all" or (rl.rollout_is == "stale" and tokens_may_be_stale(cfg))
    return chosen and (rl.recompute_logprobs or rl.rollout_is_mode == "mask")


# ---------------------------------------------------------------- rewards


@rule("rl_config.overlong_buffer_enable", "rl_config.overlong_buffer", *RESPONSE_KEYS)
def overlong_buffer_fits(cfg: Config) -> Found:
    rl, longest = cfg.rl_config, cfg.longest_response
    if not rl.overlong_buffer_enable:
        return
    path = "rl_config.overlong_buffer"
    if rl.overlong_buffer is None:
        message, key = "is needed by overlong_buffer_enable = True", response_key(cfg).rpartition(".")[2]
        yield Violation(
            path,
            None,
            message,
            f"for example a quarter of {key}: {max(1, longest // 4)}",
        )
    elif rl.overlong_buffer > longest:
        message = f"must not be longer than a response, {response_key(cfg)} = {longest}"
        yield Violation(path, rl.overlong_buffer, message)
