"""Rules about rollout that runs ahead of training, over several iterations, or until enough groups are of use."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.layout import prompts_in_generation, scorers, uses_greedy_baseline
from mindspeed_rl.config.rule import Found, is_scored, rule
from mindspeed_rl.config.schema import Config

_SAMPLING = "generate_config.sampling_config"

# ---------------------------------------------------------------- asynchrony


@rule("rl_config.staleness", "rl_config.use_integrated_worker", "rl_config.blocking")
def staleness_needs_devices_for_rollout(cfg: Config) -> Found:
    rl, path = cfg.rl_config, "rl_config.staleness"
    if rl.staleness and rl.use_integrated_worker:
        message = "a device that trains cannot generate at the same time, and use_integrated_worker = True"
        yield Violation(path, rl.staleness, message, "set use_integrated_worker: false and rollout_resource, or 0")
    if rl.staleness and rl.blocking:
        message = "generates the next iterations while one trains, but blocking = True has stages wait for each other"
        yield Violation(path, rl.staleness, message, "set blocking: false, or staleness: 0")


@rule("rl_config.balance_batch", "rl_config.guarantee_order")
def balance_needs_order(cfg: Config) -> Found:
    """Without an order every rank takes what is ready, as much as its share is."""
    rl = cfg.rl_config
    if rl.balance_batch and not rl.guarantee_order and "balance_batch" in rl.model_fields_set:
        message = "shares mini-batches out, which guarantee_order = False does not keep apart"
        yield Violation("rl_config.balance_batch", True, message, "set guarantee_order: true, or remove it")


# ---------------------------------------------------------------- partial rollout


@rule(
    "rl_config.partial_rollout_max_split",
    "rl_config.partial_rollout_threshold",
    "rl_config.require_max_age_all_finished",
)
def partial_rollout_keys_are_used(cfg: Config) -> Found:
    for key in ("partial_rollout_threshold", "require_max_age_all_finished"):
        if cfg.rl_config.partial_rollout_max_split == 1 and key in cfg.rl_config.model_fields_set:
            message = "belongs to partial rollout, but partial_rollout_max_split = 1"
            hint = "set partial_rollout_max_split above 1, or remove it"
            yield Violation(f"rl_config.{key}", getattr(cfg.rl_config, key), message, hint)


@rule("rl_config.partial_rollout_max_split", "rl_config.staleness")
def partial_rollout_is_synchronous(cfg: Config) -> Found:
    split, staleness = cfg.rl_config.partial_rollout_max_split, cfg.rl_config.staleness
    if split > 1 and staleness:
        message = (
            f"an iteration begins with what its predecessor leaves unfinished, and staleness = {staleness} begins it"
        )
        hint = "set staleness: 0, or partial_rollout_max_split: 1"
        yield Violation("rl_config.partial_rollout_max_split", split, message, hint)


@rule("rl_config.partial_rollout_max_split", "rl_config.partial_rollout_threshold", "actor.global_batch_size")
def partial_rollout_has_a_surplus(cfg: Config) -> Found:
    rl, batch = cfg.rl_config, cfg.actor.global_batch_size
    if rl.partial_rollout_max_split > 1 and prompts_in_generation(cfg) == batch:
        message = (
            f"keeps no more than global_batch_size = {batch} prompts in generation: nothing could be carried over"
        )
        hint = "below 1, or partial_rollout_max_split: 1"
        yield Violation("rl_config.partial_rollout_threshold", rl.partial_rollout_threshold, message, hint)


@rule(
    "rl_config.partial_rollout_max_split",
    "generate_config.sampling_config.detokenize",
    "generate_config.sampling_config.logprobs",
)
def partial_rollout_keeps_tokens(cfg: Config) -> Found:
    """Parts of a response come from different policies, and are joined as tokens."""
    sampling, split = cfg.generate_config.sampling_config, cfg.rl_config.partial_rollout_max_split
    if split > 1 and sampling.detokenize:
        message = f"texts of the parts of a response cannot be joined, and partial_rollout_max_split = {split}"
        yield Violation(f"{_SAMPLING}.detokenize", True, message, "set it to false: rewards decode the tokens")
    if split > 1 and not sampling.logprobs:
        message = f"is needed with partial_rollout_max_split = {split}: tokens of older policies are corrected for"
        yield Violation(f"{_SAMPLING}.logprobs", sampling.logprobs, message, "set it to true")


@rule("rl_config.adv_estimator", "rl_config.partial_rollout_max_split")
def greedy_responses_are_whole(cfg: Config) -> Found:
    """Beginnings of sampled responses are carried over, and no others."""
    estimator, split = cfg.rl_config.adv_estimator, cfg.rl_config.partial_rollout_max_split
    if uses_greedy_baseline(cfg) and split > 1:
        message = f"needs whole greedy responses, but partial_rollout_max_split = {split} ends iterations before"
        hint = "set partial_rollout_max_split: 1, or another adv_estimator"
        yield Violation("rl_config.adv_estimator", estimator, message, hint)


# ---------------------------------------------------------------- dynamic sampling


@rule("rl_config.filter_groups_enable", "rl_config.partial_rollout_max_split", "rl_config.staleness")
def filtered_iterations_are_whole(cfg: Config) -> Found:
    """How many prompts an iteration takes is known when its last responses are scored."""
    rl, path = cfg.rl_config, "rl_config.filter_groups_enable"
    if rl.filter_groups_enable and rl.partial_rollout_max_split > 1:
        message = f"judges whole groups, but partial_rollout_max_split = {rl.partial_rollout_max_split} splits them"
        yield Violation(path, True, message, "set partial_rollout_max_split: 1, or filter_groups_enable: false")
    if rl.filter_groups_enable and rl.staleness:
        message = f"carries surplus groups to the next iteration, which staleness = {rl.staleness} begins before"
        yield Violation(path, True, message, "set staleness: 0, or filter_groups_enable: false")


@rule("rl_config.filter_groups_enable", "rl_config.n_samples_per_prompt")
def filtered_groups_can_differ(cfg: Config) -> Found:
    rl = cfg.rl_config
    if rl.filter_groups_enable and rl.n_samples_per_prompt == 1:
        message = "compares the samples of a group, and n_samples_per_prompt = 1"
        yield Violation("rl_config.filter_groups_enable", True, message, "set n_samples_per_prompt above 1, or false")


@rule(
    "rl_config.filter_groups_enable",
    "rl_config.filter_groups_metric",
    "rl_config.verifier_function",
    "rl_config.rule_reward",
    "reward_config.load",
)
def filter_metric_is_known(cfg: Config) -> Found:
    rl = cfg.rl_config
    if rl.filter_groups_enable:
        yield from is_scored("rl_config.filter_groups_metric", rl.filter_groups_metric, scorers(cfg))
