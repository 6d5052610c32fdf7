"""Rules on reward models."""

from __future__ import annotations

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.files import actor_path, resolve_reward_model
from mindspeed_rl.config.layout import in_place_of_actor, uses_greedy_baseline, uses_reward_model
from mindspeed_rl.config.model import CriticModel
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.config.rule import CP, EP, PP, TP, Found, rule
from mindspeed_rl.config.rules_devices import (
    CP_ALGO,
    VPP,
    context_parallel_divides_heads,
    pipeline_divides_layers,
    training_tp_divides_model,
)
from mindspeed_rl.config.rules_experts import expert_parallel_divides_experts, experts_need_sequence_parallel
from mindspeed_rl.config.schema import Config

_LOAD, _WEIGHT, _RULES = "reward_config.load", "rl_config.reward_model_weight", "rl_config.rule_reward"
_MAX_LENGTH = "reward_config.max_length"
_OF_VERIFIERS = ("verifier_function", "verifier_weight", "verifier_timeout", "verifier_parallel")
_SOURCES = "rl_config.source_verifier_weight"


def _shape(cfg: Config) -> CriticModel | None:
    try:
        return resolve_reward_model(cfg)
    except ConfigError:  # reported by the rule `reward_model_is_known`
        return None


@rule(_LOAD)
def reward_model_is_known(cfg: Config) -> Found:
    try:
        resolve_reward_model(cfg)
    except ConfigError as error:
        yield from error.violations


@rule("reward_config", _WEIGHT, "generate_config.offload_reward_model")
def reward_model_keys_are_used(cfg: Config) -> Found:
    if uses_reward_model(cfg):
        return
    given = {f"reward_config.{key}": getattr(cfg.reward_config, key) for key in cfg.reward_config.model_fields_set}
    if "reward_model_weight" in cfg.rl_config.model_fields_set:
        given[_WEIGHT] = cfg.rl_config.reward_model_weight
    if cfg.generate_config.offload_reward_model:
        given["generate_config.offload_reward_model"] = True
    for path, value in sorted(given.items()):
        if path != _LOAD:
            yield Violation(path, value, "there is no reward model", f"set {_LOAD}, or remove it")


@rule(_LOAD, _RULES, _WEIGHT)
def something_scores_responses(cfg: Config) -> Found:
    rl = cfg.rl_config
    if rl.rule_reward:
        return
    if not uses_reward_model(cfg):
        message = f"leaves nothing that scores responses: {_LOAD} is not set"
        yield Violation(_RULES, False, message, f"set it to true, or {_LOAD} to a reward model")
    elif not rl.reward_model_weight:
        yield Violation(_WEIGHT, rl.reward_model_weight, "leaves every reward 0: nothing else scores", "1.0")


@rule(_RULES, "rl_config.custom_reward_function", *(f"rl_config.{key}" for key in _OF_VERIFIERS))
def verifier_keys_are_used(cfg: Config) -> Found:
    rl = cfg.rl_config
    if rl.rule_reward:
        return
    given = [key for key in _OF_VERIFIERS if key in rl.model_fields_set and getattr(rl, key) != []]
    for key in (*given, *(["custom_reward_function"] if rl.custom_reward_function else [])):
        hint = "remove it, set verifier_function and verifier_weight to [], or rule_reward: true"
        yield Violation(f"rl_config.{key}", getattr(rl, key), "no verifier runs with rule_reward = False", hint)


@rule(_LOAD, "rl_config.adv_estimator")
def greedy_responses_have_rewards(cfg: Config) -> Found:
    if uses_reward_model(cfg) and uses_greedy_baseline(cfg):
        message = "needs rewards of greedy responses, which reward models do not score"
        yield Violation("rl_config.adv_estimator", "remax", message, f"another adv_estimator, or {_LOAD}: null")


@rule(_LOAD, _RULES, "actor.val_data_path", _SOURCES)
def validation_has_verifiers(cfg: Config) -> Found:
    """Validation is scored by rules alone."""
    rl, data = cfg.rl_config, cfg.actor.val_data_path
    if not data:
        return
    hint = "add a verifier; with the weight 0 it does not train"
    if not rl.rule_reward:
        message = "validation is scored by verifiers, and rule_reward = False: no verifier runs"
        yield Violation(actor_path(cfg, "val_data_path"), data, message, hint)
        return
    for source, weights in rl.source_verifier_weight.items():
        if set(weights) == {REWARD_MODEL}:
            message = f"validation is scored by verifiers, and val_data_path = {data!r}: none runs on this source"
            yield Violation(f"{_SOURCES}.{source}", weights, message, hint)


# ---------------------------------------------------------------- shape and layout


@rule(_LOAD, TP, CP, CP_ALGO, PP, EP, "actor.sequence_parallel")
def reward_model_fits_layout(cfg: Config) -> Found:
    """It is divided as the actor is, its layers evenly."""
    shape, in_place = _shape(cfg), in_place_of_actor(cfg)
    checks = (
        training_tp_divides_model,
        context_parallel_divides_heads,
        pipeline_divides_layers,
        experts_need_sequence_parallel,
        expert_parallel_divides_experts,
    )
    for check in checks if shape is not None else ():
        for found in check(in_place, shape):
            message = found.message.replace("the model's", "the reward model's")
            yield Violation(
                found.path, found.value, f"{message} ({_LOAD} = {cfg.reward_config.load!r})", found.suggestion
            )


@rule(_LOAD, VPP)
def reward_model_is_not_interleaved(cfg: Config) -> Found:
    """Megatron takes one schedule for all models of a process."""
    layers = cfg.actor.num_layers_per_virtual_pipeline_stage
    if uses_reward_model(cfg) and layers is not None:
        path = actor_path(cfg, "num_layers_per_virtual_pipeline_stage")
        yield Violation(path, layers, "a reward model's stages cannot be interleaved", f"remove it, or {_LOAD}")


@rule(_LOAD, EP, "rl_config.filter_groups_enable")
def reward_model_makes_equal_passes(cfg: Config) -> Found:
    ep = cfg.actor.expert_model_parallel_size
    if uses_reward_model(cfg) and cfg.rl_config.filter_groups_enable and ep > 1:
        message = f"gives ranks different numbers of groups to score, and expert_model_parallel_size = {ep} has them "
        message += "make their passes together"
        yield Violation("rl_config.filter_groups_enable", True, message, f"set it to false, or {_LOAD}: null")


@rule(_LOAD, _MAX_LENGTH)
def reward_model_has_positions(cfg: Config) -> Found:
    shape, length = _shape(cfg), cfg.reward_config.max_length
    if shape is not None and length is not None and length > shape.longest_sequence:
        message = f"is more than the {shape.longest_sequence} tokens that {cfg.reward_config.load} is made for"
        yield Violation(_MAX_LENGTH, length, message, f"at most {shape.longest_sequence}, or null")


@rule(_LOAD, _MAX_LENGTH, "rl_config.use_dynamic_bsz", "rl_config.max_packing_token_size")
def packing_size_holds_a_rewarded_sequence(cfg: Config) -> Found:
    cap, length = cfg.rl_config.max_packing_token_size, cfg.reward_config.max_length
    if not uses_reward_model(cfg) or cap is None or (length is not None and length < cap):
        return
    message = f"must be below rl_config.max_packing_token_size = {cap}, which holds a sequence and one token more"
    yield Violation(_MAX_LENGTH, length, message, f"at most {cap - 1}")
