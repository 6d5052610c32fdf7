"""Everything a run reads, found and checked before a device is touched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mindspeed_rl.algorithms.advantages import ADVANTAGES
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl.algorithms.losses import POLICY_LOSSES
from mindspeed_rl.algorithms.registry import Registry, load_custom_algorithms
from mindspeed_rl.checkpoint.hf import HFWeights, is_hf_folder
from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.algorithm import FULL_KL
from mindspeed_rl.config.files import actor_path, resolve_model, resolve_reward_model
from mindspeed_rl.config.layout import (
    derive_layout,
    uses_greedy_baseline,
    uses_reward_model,
)
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import nearest
from mindspeed_rl.config.schema import Config, RLConfig
from mindspeed_rl.data.prompts import PromptDataset, PromptSample, load_prompts
from mindspeed_rl.data.reward_inputs import RewardInputs
from mindspeed_rl.data.sampler import make_sampler
from mindspeed_rl.data.tokenizer import actor_tokenizer, check_tokenizer
from mindspeed_rl.data.tool_turns import ToolTurns
from mindspeed_rl.resharding.names import check_hf_names
from mindspeed_rl.resharding.tables import VALUE_HEAD_NAME
from mindspeed_rl.rewards.manager import RewardManager
from mindspeed_rl.tools.toolbox import load_tools
from mindspeed_rl.trainer.source import RunInputs, check_weights, checkpoint_store, choose_source


@dataclass(frozen=True, kw_only=True)
class Inputs(RunInputs):
    """What `prepare` found."""

    tokenizer: PreTrainedTokenizerBase
    dataset: PromptDataset
    validation: PromptDataset | None  # what to validate on, if anything


def prepare(config: Config) -> Inputs:
    """Open and check what the configuration names.

    Raises:
        MindSpeedRLError: weights, checkpoint, tokenizer, data or verifiers cannot be used, or a folder not written.
    """
    actor = config.actor
    model, layout = resolve_model(config), derive_layout(config)
    source, state = choose_source(config)
    if "load" in config.critic_config.model_fields_set:
        source = replace(source, critic_weights=_critic_weights(config, model))
    check_weights(model, source)
    RewardManager(config.rl_config).close()  # verifiers load, or say why not
    _check_algorithms(config.rl_config)
    tokenizer = actor_tokenizer(config, source.hf_folder)
    check_tokenizer(tokenizer, model)
    schemas = [tool.schema for tool in load_tools(config.tools_config).values()]
    if schemas:
        ToolTurns(actor, tokenizer, schemas)  # the template can write what tools answer, or says why not
    dataset = load_prompts(actor, config.rl_config, tokenizer, tools=schemas)
    if uses_reward_model(config):
        _check_reward_model(config, tokenizer, dataset[0])
    validation = validation_prompts(config, tokenizer)
    _check_sources(config.rl_config, [dataset, *([validation] if validation else [])])
    sampler = make_sampler(actor, dataset.row_sources)
    if state is not None:
        sampler.load_state_dict(state["sampler"])
        _check_carried(state, config)
    return Inputs(
        model=model,
        layout=layout,
        source=source,
        state=state,
        sampler=sampler,
        store=checkpoint_store(config, source, model, layout),
        tokenizer=tokenizer,
        dataset=dataset,
        validation=validation,
    )


def _check_sources(rl: RLConfig, datasets: Sequence[PromptDataset]) -> None:
    """A source that no row has is a name spelled wrong; it is not known before all rows have been read."""
    key = "rl_config.source_verifier_weight"
    if not all(dataset.is_whole for dataset in datasets):
        return
    known = sorted(set().union(*(dataset.sources_read for dataset in datasets)))
    violations = [
        Violation(f"{key}.{source}", weights, "no row is of this source", nearest(source, known))
        for source, weights in rl.source_verifier_weight.items()
        if source not in known
    ]
    if violations:
        raise ConfigError(violations)


def validation_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptDataset | None:
    """The prompts of `val_data_path`, which is read like `data_path`.

    Raises:
        DataError: they cannot be used.
    """
    if config.actor.val_data_path is None:
        return None
    return load_prompts(config.actor.of_validation(), config.rl_config, tokenizer, "val_data_path")


def _critic_weights(config: Config, model: ModelConfig) -> str:
    """The Hugging Face folder that the critic starts from: of a model like the actor, or one with a value head."""
    load, key = config.critic.load or "", "critic_config.load"
    if not is_hf_folder(load):
        raise ConfigError([Violation(key, load, "is no Hugging Face folder with weights")])
    names = HFWeights(load).names
    check_hf_names(model.as_critic() if VALUE_HEAD_NAME in names else model, names)
    return load


def _check_reward_model(config: Config, tokenizer: PreTrainedTokenizerBase, sample: PromptSample) -> None:
    """Its weights are complete, head included, and it can read a prompt of the data."""
    key, load = "reward_config.load", config.reward_config.load or ""
    shape = resolve_reward_model(config)
    if shape is None:
        raise ConfigError([Violation(key, load, "no such folder with a config.json")])
    weights = HFWeights(load)
    if VALUE_HEAD_NAME not in weights.names:
        message = f"has no {VALUE_HEAD_NAME}: a reward model is a sequence classification with one label"
        raise ConfigError([Violation(key, load, message, "train one first, as examples/make_reward_model.py does")])
    head = list(weights.slice(VALUE_HEAD_NAME).get_shape())
    if head != [1, shape.hidden_size]:
        message = f"{VALUE_HEAD_NAME} has the shape {head}, expected {[1, shape.hidden_size]}: one label"
        raise ConfigError([Violation(key, load, message)])
    check_hf_names(shape, weights.names)
    inputs = RewardInputs(config, tokenizer)
    if not inputs.as_generated:
        inputs.tokenised(sample, "")


def _check_algorithms(rl: RLConfig) -> None:
    """Names that a user's file registers are known from now on; others are not."""
    load_custom_algorithms(rl.custom_algorithm_file)
    violations = []
    registries: tuple[Registry[Any], ...] = (ADVANTAGES, POLICY_LOSSES)
    for registry in registries if rl.kl_penalty == FULL_KL else (*registries, KL_ESTIMATORS):
        name = getattr(rl, registry.key.removeprefix("rl_config."))
        if name not in registry.names():
            known = f"known: {', '.join(registry.names())}"
            message = f"is registered neither here nor in custom_algorithm_file = {rl.custom_algorithm_file}"
            violations.append(Violation(registry.key, name, message, known))
    if violations:
        raise ConfigError(violations)


def generation_keys(config: Config) -> dict[str, Any]:
    """Keys that shape an iteration in the TransferDock, and the values that responses carried over depend on."""
    rl = config.rl_config
    names = (
        "partial_rollout_max_split",
        "partial_rollout_threshold",
        "require_max_age_all_finished",
        "filter_groups_enable",
        "n_samples_per_prompt",
        "mini_batch_size",
        "shuffle_mini_batch",
        "guarantee_order",
        "balance_batch",
        "epochs",
        "recompute_logprobs",
        "use_kl_in_reward",
    )
    of_rewards = (  # which surplus groups bring along
        "rule_reward",
        "verifier_function",
        "verifier_weight",
        "reward_model_weight",
        "source_verifier_weight",
        "reward_scale",
        "filter_groups_metric",
        "overlong_buffer_enable",
        "overlong_buffer",
        "overlong_buffer_penalty_factor",
    )
    return {
        **{f"rl_config.{name}": getattr(rl, name) for name in names},
        **{f"rl_config.{name}": getattr(rl, name) for name in of_rewards if rl.filter_groups_enable},
        **({"reward_config.load": config.reward_config.load} if rl.filter_groups_enable else {}),
        actor_path(config, "global_batch_size"): config.actor.global_batch_size,
        "rl_config.init_kl_coef": rl.init_kl_coef > 0,
        "rl_config.adv_estimator": rl.adv_estimator if uses_greedy_baseline(config) else None,
        "rl_config.kl_penalty": rl.kl_penalty == FULL_KL,
    }


def _check_carried(state: dict[str, Any], config: Config) -> None:
    """Responses that an iteration left to the next one fit only into iterations like it."""
    if not state.get("carried"):
        return
    hint = "keep it for at least one iteration more: the checkpoint holds responses that are not trained on yet"
    saved = state["generation_keys"]
    violations = [
        Violation(key, value, f"was {saved[key]!r} in the run that is resumed", hint)
        for key, value in generation_keys(config).items()
        if saved.get(key, value) != value  # an older version has not known all of them
    ]
    if violations:
        raise ConfigError(violations)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, hf_folder: str) -> list[int]:
    """Ids that end a response: the tokenizer's, and those of the model's generation settings."""
    stops = {tokenizer.eos_token_id}
    path = Path(hf_folder) / "generation_config.json"
    if path.exists():
        configured = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") or []
        stops |= set(configured if isinstance(configured, list) else [configured])
    return sorted(stop for stop in stops if stop is not None)
