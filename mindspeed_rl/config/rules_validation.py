"""Rules on validation."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.rule import Found, is_scored, rule
from mindspeed_rl.config.schema import Config

_VAL = "generate_config.val_sampling_config"
_WHEN = ("test_freq", "val_before_train")


@rule("actor.val_data_path", *(f"rl_config.{key}" for key in _WHEN))
def validation_has_data_and_a_time(cfg: Config) -> Found:
    rl, data = cfg.rl_config, cfg.actor.val_data_path
    if data and not (rl.test_freq or rl.val_before_train):
        message = "is not read: neither rl_config.test_freq nor rl_config.val_before_train is set"
        yield Violation(actor_path(cfg, "val_data_path"), data, message, "set one of these, or remove it")
    for key in _WHEN:
        if getattr(rl, key) and not data:
            message = "has nothing to validate on: val_data_path is not set"
            yield Violation(f"rl_config.{key}", getattr(rl, key), message, "set megatron_training.val_data_path")


@rule("actor.val_data_path", "actor.val_max_samples")
def validation_samples_are_used(cfg: Config) -> Found:
    samples = cfg.actor.val_max_samples
    if samples and not cfg.actor.val_data_path:
        path = actor_path(cfg, "val_max_samples")
        yield Violation(path, samples, "has no effect without val_data_path", "set that, or remove it")


@rule("actor.val_data_path", "rl_config.val_metric", "rl_config.log_val_generations", _VAL)
def validation_keys_are_used(cfg: Config) -> Found:
    if cfg.actor.val_data_path:
        return
    sampling = cfg.generate_config.val_sampling_config
    used = {
        "rl_config.log_val_generations": cfg.rl_config.log_val_generations,
        "rl_config.val_metric": cfg.rl_config.val_metric if cfg.rl_config.val_metric != "reward" else None,
        **{f"{_VAL}.{key}": getattr(sampling, key) for key in sorted(sampling.model_fields_set)},
    }
    for path, value in used.items():
        if value not in (None, 0) or path.startswith(_VAL):
            yield Violation(path, value, "has no effect without val_data_path", "set that, or remove it")


@rule("rl_config.val_metric", "rl_config.verifier_function", "rl_config.rule_reward")
def validation_goes_by_what_is_scored(cfg: Config) -> Found:
    verifiers = cfg.rl_config.verifier_function if cfg.rl_config.rule_reward else []
    yield from is_scored("rl_config.val_metric", cfg.rl_config.val_metric, verifiers)


@rule("rl_config.test_freq", "rl_config.staleness")
def validation_finds_engines_idle(cfg: Config) -> Found:
    if cfg.rl_config.test_freq and cfg.rl_config.staleness:
        message = f"rollout has no time for it with staleness = {cfg.rl_config.staleness}: it works ahead"
        hint = "evaluate checkpoints with cli/evaluate.py, or set staleness: 0"
        yield Violation("rl_config.test_freq", cfg.rl_config.test_freq, message, hint)


@rule(_VAL, "rl_config.max_prompt_length", "generate_config.max_model_len")
def validation_responses_fit_and_differ(cfg: Config) -> Found:
    validation, generate = cfg.generate_config.val_sampling_config, cfg.generate_config
    if validation.n > 1 and validation.temperature == 0:
        message = f"responses to a prompt would all be the same with {_VAL}.temperature = 0"
        yield Violation(f"{_VAL}.n", validation.n, message, "set the temperature above 0, or n: 1")
    longest = generate.max_model_len - cfg.rl_config.max_prompt_length
    if validation.max_tokens and validation.max_tokens > longest:
        message = f"and rl_config.max_prompt_length = {cfg.rl_config.max_prompt_length} together are more than "
        message += f"generate_config.max_model_len = {generate.max_model_len}"
        yield Violation(f"{_VAL}.max_tokens", validation.max_tokens, message, f"at most {longest}")
