"""The rules that tie keys together, and the check of all of them (those on devices are in `rules_devices.py`).

A rule is one small function: it reads the configuration, yields violations, and changes nothing. Rules run before
Ray, torch or a device is touched.

`keys` of a rule are the paths that it reads; `actor.x` means `x` of `actor_config`, else of `megatron_training`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from math import prod
from typing import Any

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config import (  # noqa: F401  # their rules register themselves
    rules_algorithm,
    rules_ascend,
    rules_devices,
    rules_experts,
    rules_lora,
    rules_profiler,
    rules_reward_model,
    rules_rollout,
    rules_supervised,
    rules_tools,
    rules_validation,
)
from mindspeed_rl.config.files import actor_path, checkpoint_model, resolve_model, touches
from mindspeed_rl.config.layout import model_parallel, pipeline_chunks, scorers
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.rule import (
    CP,
    FORWARD_SIZES,
    PP,
    RESPONSE_KEYS,
    RULES,
    TP,
    WORLD,
    Found,
    Rule,
    divides,
    nearest,
    response_key,
    rule,
)
from mindspeed_rl.config.rules_memory import plan_fits_device
from mindspeed_rl.config.schema import Config

VERIFIERS = (
    "acc",
    "format",
    "step",
    "strict_format",
    "base_acc",
    "math_17k_acc",
    "acc_for_ppo",
    "acc_for_dapo",
    "math_verify",
    "custom",
    "reasoning_gym",
)

_MODEL_KEYS = ("model", "actor.model", "actor.load")
_LONGEST_NAME = 200  # file systems end at 255 bytes
_DYNAMIC, _PACKING = "rl_config.use_dynamic_bsz", "rl_config.max_packing_token_size"
_FORWARD_SIZES = tuple(f"rl_config.{key}" for key in FORWARD_SIZES)
_MICRO_BATCHES = ("megatron_training", "actor_config", "critic_config", "reward_config")


def check(cfg: Config, broken: Sequence[str] = ()) -> list[Violation]:
    """All violations of all rules, except of rules that read a key in `broken` (values already refused)."""
    model = None if _any_touches(_MODEL_KEYS, broken) else _known_model(cfg)
    violations: list[Violation] = []
    for each in RULES:
        if _any_touches(each.keys, broken) or (each.needs_model and model is None):
            continue
        if not rules_supervised.applies(each, cfg):
            continue
        violations += each.find(cfg, model) if each.needs_model else each.find(cfg)
    if model is not None and not violations and not broken:  # an estimate takes divisions that come out even
        violations += plan_fits_device(cfg, model)
    return violations


def _any_touches(keys: Sequence[str], broken: Sequence[str]) -> bool:
    return any(touches(key, broken) for key in keys)


def _known_model(cfg: Config) -> ModelConfig | None:
    try:
        return resolve_model(cfg)
    except ConfigError:  # reported by the rule `model_is_known`, or by files.py when a file is missing
        return None


# ---------------------------------------------------------------- what a run needs


@rule("actor.data_path", "actor.tokenizer_name_or_path", "actor.load")
def required_paths(cfg: Config) -> Found:
    hints = {
        "data_path": "jsonl or parquet files with the prompts",
        "tokenizer_name_or_path": "a Hugging Face folder with a tokenizer",
        "load": "a Hugging Face folder, or a checkpoint of this trainer: training starts from its weights",
    }
    for key, hint in hints.items():
        if not getattr(cfg.actor, key):
            yield Violation(
                actor_path(cfg, key), getattr(cfg.actor, key), "required, but not set", f"set it to {hint}"
            )


@rule(*_MODEL_KEYS)
def model_is_known(cfg: Config) -> Found:
    try:
        # `auto` without a file: no contradiction, only a path that this machine may lack; files.py names it
        if cfg.actor.model != "auto" or checkpoint_model(cfg) is not None:
            resolve_model(cfg)
    except ConfigError as error:
        yield from error.violations


@rule("actor.resume", "actor.save")
def resume_needs_save(cfg: Config) -> Found:
    if cfg.actor.resume == "auto" and not cfg.actor.save:
        hint = "set actor_config.save, or resume: never"
        yield Violation(actor_path(cfg, "resume"), "auto", "resumes from the folder `save`, which is not set", hint)


@rule("actor.keep_last", "actor.save_hf", "actor.async_save", "actor.save")
def checkpoint_keys_are_used(cfg: Config) -> Found:
    for key in ("keep_last", "save_hf", "async_save"):
        if getattr(cfg.actor, key) and not cfg.actor.save:
            message = "is about checkpoints, and save is not set"
            yield Violation(
                actor_path(cfg, key), getattr(cfg.actor, key), message, "set actor_config.save, or remove it"
            )


@rule("run_name")
def run_name_is_one_folder(cfg: Config) -> Found:
    """Runs lie beside each other in `output_dir`, where `latest` names the newest."""
    name = cfg.run_name
    if name is None:
        return
    if not name.strip() or "/" in name or "\0" in name or name in (".", "..", "latest"):
        message = "must be the name of one folder: not blank, without /, none of '.', '..' and 'latest'"
        yield Violation("run_name", name, message, "set output_dir for another parent folder; null makes up a name")
    elif len(name.encode()) > _LONGEST_NAME:
        message = f"is longer than {_LONGEST_NAME} characters (bytes of UTF-8), as a file name may not be much longer"
        yield Violation("run_name", name, message, "shorten it")


# ---------------------------------------------------------------- batches and lengths


@rule("rl_config.mini_batch_size", "actor.global_batch_size")
def mini_batches_fill_iteration(cfg: Config) -> Found:
    path = actor_path(cfg, "global_batch_size")
    yield from divides(path, cfg.actor.global_batch_size, "rl_config.mini_batch_size", cfg.rl_config.mini_batch_size)


@rule("rl_config.mini_batch_size", "rl_config.n_samples_per_prompt", WORLD, TP, CP, PP)
def mini_batch_fills_ranks(cfg: Config) -> Found:
    rl = cfg.rl_config
    data_parallel = rl.actor_resource.num_npus // prod(model_parallel(cfg))
    sequences = rl.mini_batch_size * rl.n_samples_per_prompt
    if data_parallel and sequences % data_parallel:
        message = (
            f"times n_samples_per_prompt = {rl.n_samples_per_prompt} gives {sequences} sequences, "
            f"which the {data_parallel} data-parallel ranks (devices / (TP x CP x PP)) cannot share evenly"
        )
        hint = f"a multiple of {data_parallel} always fits"
        yield Violation("rl_config.mini_batch_size", rl.mini_batch_size, message, hint)


@rule("rl_config.shuffle_mini_batch", "rl_config.guarantee_order")
def shuffling_needs_order(cfg: Config) -> Found:
    """A shuffle is an order of the rows, which the TransferDock keeps only if it keeps orders at all."""
    if cfg.rl_config.shuffle_mini_batch and not cfg.rl_config.guarantee_order:
        hint = "set guarantee_order: true, or shuffle_mini_batch: false"
        yield Violation("rl_config.shuffle_mini_batch", True, "needs guarantee_order = True, which is False", hint)


@rule("rl_config.max_prompt_length", *RESPONSE_KEYS, "generate_config.max_model_len")
def sequence_fits_rollout(cfg: Config) -> Found:
    yield from _fits(cfg, "generate_config.max_model_len", cfg.generate_config.max_model_len)


@rule("rl_config.max_prompt_length", *RESPONSE_KEYS, "actor.seq_length")
def sequence_fits_training(cfg: Config) -> Found:
    yield from _fits(cfg, actor_path(cfg, "seq_length"), cfg.actor.seq_length)


def _fits(cfg: Config, limit_path: str, limit: int) -> Found:
    prompt, response = cfg.rl_config.max_prompt_length, cfg.longest_response
    if cfg.longest_sequence > limit:
        message = (
            f"is shorter than rl_config.max_prompt_length = {prompt} plus {response_key(cfg)} = {response}, "
            f"together {cfg.longest_sequence}"
        )
        yield Violation(limit_path, limit, message, f"set it to {cfg.longest_sequence}, or shorten the others")


@rule(_DYNAMIC, _PACKING, "rl_config.max_prompt_length", *RESPONSE_KEYS)
def packing_size_is_given_and_used(cfg: Config) -> Found:
    size = cfg.rl_config.max_packing_token_size
    if cfg.rl_config.use_dynamic_bsz and size is None:
        message = "use_dynamic_bsz = True needs the most tokens of a micro-batch"
        hint = f"at least {cfg.longest_sequence}: the longest prompt and response"
        yield Violation(_PACKING, None, message, hint)
    elif size is not None and not cfg.rl_config.use_dynamic_bsz:
        hint = "set use_dynamic_bsz: true, or remove it"
        yield Violation(_PACKING, size, "is used with use_dynamic_bsz = True only, which is False", hint)


@rule(_PACKING, "rl_config.max_prompt_length", *RESPONSE_KEYS)
def packing_size_holds_a_sequence(cfg: Config) -> Found:
    if cfg.rl_config.max_packing_token_size is not None:
        yield from _fits(cfg, _PACKING, cfg.rl_config.max_packing_token_size)


@rule(_DYNAMIC, "actor.micro_batch_size", "critic_config", "reward_config.micro_batch_size", *_FORWARD_SIZES)
def micro_batch_sizes_are_used(cfg: Config) -> Found:
    """With token-capped micro-batches nothing reads a number of sequences, so none may be set."""
    for path in (*(f"{section}.micro_batch_size" for section in _MICRO_BATCHES), *_FORWARD_SIZES):
        section, _, key = path.partition(".")
        values = getattr(cfg, section)
        if cfg.rl_config.use_dynamic_bsz and key in values.model_fields_set:
            message = "has no effect: use_dynamic_bsz = True limits micro-batches by max_packing_token_size"
            hint = f"remove it (on the command line: ~{path}), or set use_dynamic_bsz: false"
            yield Violation(path, getattr(values, key), message, hint)


@rule("actor.seq_length", needs_model=True)
def training_length_fits_model(cfg: Config, model: ModelConfig) -> Found:
    yield from _within_positions(actor_path(cfg, "seq_length"), cfg.actor.seq_length, model)


@rule("generate_config.max_model_len", needs_model=True)
def rollout_length_fits_model(cfg: Config, model: ModelConfig) -> Found:
    yield from _within_positions("generate_config.max_model_len", cfg.generate_config.max_model_len, model)


def _within_positions(path: str, length: int, model: ModelConfig) -> Found:
    for key in ("max_position_embeddings", "sliding_window"):
        limit = getattr(model, key)
        if limit is not None and length > limit:
            yield Violation(path, length, f"is longer than the model's {key} = {limit}", f"at most {limit}")


@rule("generate_config.max_num_batched_tokens", "generate_config.max_num_seqs")
def batched_tokens_hold_sequences(cfg: Config) -> Found:
    tokens, sequences = cfg.generate_config.max_num_batched_tokens, cfg.generate_config.max_num_seqs
    if tokens is not None and tokens < sequences:
        message = f"is less than generate_config.max_num_seqs = {sequences}: a step decodes a token of each sequence"
        hint = f"at least {sequences}, or null for vLLM's own choice"
        yield Violation("generate_config.max_num_batched_tokens", tokens, message, hint)


@rule("generate_config.sampling_config.temperature")
def temperature_is_positive(cfg: Config) -> Found:
    if cfg.generate_config.sampling_config.temperature == 0:
        message = "greedy rollouts have no distribution to train on"
        hint = "use a temperature above 0, usually 1.0"
        yield Violation("generate_config.sampling_config.temperature", 0.0, message, hint)


@rule("actor.system_prompt", "actor.chat_template", "actor.chat_template_kwargs", "actor.apply_chat_template")
def template_keys_need_the_template(cfg: Config) -> Found:
    actor = cfg.actor
    for key in ("system_prompt", "chat_template", "chat_template_kwargs"):
        if getattr(actor, key) and not actor.apply_chat_template:
            message = "has no effect with apply_chat_template = False"
            hint = "set apply_chat_template: true, or remove it"
            yield Violation(actor_path(cfg, key), getattr(actor, key), message, hint)


@rule("actor.custom_sampler", "actor.data_source_weights", "actor.no_shuffle")
def rows_are_chosen_in_one_way(cfg: Config) -> Found:
    for key in ("data_source_weights", "no_shuffle"):
        if cfg.actor.custom_sampler is not None and getattr(cfg.actor, key):
            message = "has no effect with custom_sampler, which chooses all rows"
            yield Violation(actor_path(cfg, key), getattr(cfg.actor, key), message, "remove one of the two")
    if cfg.actor.data_source_weights == {}:
        message = "names no source"
        yield Violation(actor_path(cfg, "data_source_weights"), {}, message, "null uses all of them")


@rule("actor.data_seed", "actor.no_shuffle")
def an_order_is_drawn(cfg: Config) -> Found:
    if cfg.actor.data_seed is not None and cfg.actor.no_shuffle:
        message = "has no effect with no_shuffle = True"
        yield Violation(actor_path(cfg, "data_seed"), cfg.actor.data_seed, message, "remove one of the two")


# ---------------------------------------------------------------- recomputation and optimizer


@rule("actor.recompute_granularity", "actor.recompute_method", "actor.recompute_num_layers")
def recompute_keys_agree(cfg: Config) -> Found:
    """Megatron's own condition: method and number of layers belong to `full`, and to nothing else."""
    full = cfg.actor.recompute_granularity == "full"
    for key in ("recompute_method", "recompute_num_layers"):
        value = getattr(cfg.actor, key)
        if full and value is None:
            example = "uniform" if key == "recompute_method" else "1"
            message = "is needed with recompute_granularity = 'full'"
            yield Violation(actor_path(cfg, key), None, message, f"for example {key}: {example}")
        elif not full and value is not None:
            message = f"needs recompute_granularity = 'full', which is {cfg.actor.recompute_granularity!r}"
            yield Violation(actor_path(cfg, key), value, message, "set recompute_granularity: full, or remove it")


@rule("actor.recompute_num_layers", PP, "actor.num_layer_list", "actor.noop_layers", needs_model=True)
def recompute_layers_exist(cfg: Config, model: ModelConfig) -> Found:
    layers, positions = cfg.actor.recompute_num_layers, model.num_layers + len(cfg.actor.noop_layers or ())
    here = max(cfg.actor.num_layer_list or (positions // cfg.actor.pipeline_model_parallel_size,))
    if layers is not None and layers > max(here, 1):
        message = f"a pipeline stage has only {here} of the model's {model.num_layers} layers"
        yield Violation(actor_path(cfg, "recompute_num_layers"), layers, message, f"at most {here}")


@rule(
    "actor.recompute_num_layers",
    "actor.recompute_method",
    PP,
    "actor.num_layer_list",
    "actor.noop_layers",
    "actor.num_layers_per_virtual_pipeline_stage",
    needs_model=True,
)
def uniform_recomputation_divides_layers(cfg: Config, model: ModelConfig) -> Found:
    """Megatron goes through a chunk's layers by groups, and does not stop at the last layer."""
    group = cfg.actor.recompute_num_layers
    if cfg.actor.recompute_method != "uniform" or group is None:
        return
    if model.num_layers + len(cfg.actor.noop_layers or ()) < cfg.actor.pipeline_model_parallel_size:
        return  # refused for that
    chunks = {len(layers) for stage in pipeline_chunks(model.num_layers, cfg.actor) for layers in stage}
    uneven = sorted(size for size in chunks if size % group)
    if uneven:
        message = (
            f"does not divide {uneven[0]}, the layers of a chunk of the model, as recompute_method = 'uniform' needs"
        )
        possible = [number for number in range(1, max(chunks) + 1) if not any(size % number for size in chunks)]
        hint = f"possible: {', '.join(map(str, possible))}; or recompute_method: block"
        yield Violation(actor_path(cfg, "recompute_num_layers"), group, message, hint)


@rule("actor.lr", "actor.min_lr", "critic_config", "actor.stage")
def min_lr_below_lr(cfg: Config) -> Found:
    if cfg.actor.min_lr > cfg.actor.lr:
        message = f"is larger than {actor_path(cfg, 'lr')} = {cfg.actor.lr!r}"
        yield Violation(actor_path(cfg, "min_lr"), cfg.actor.min_lr, message, "the decay ends at min_lr: lower it")
    elif cfg.actor.stage == "ray_ppo" and cfg.critic.min_lr > cfg.critic.lr:
        message = f"is larger than the critic's lr = {cfg.critic.lr!r}"
        yield Violation("critic_config.min_lr", cfg.critic.min_lr, message, "the decay ends at min_lr: lower it")


# ---------------------------------------------------------------- rewards


@rule("rl_config.verifier_function")
def verifiers_are_known(cfg: Config) -> Found:
    for index, name in enumerate(cfg.rl_config.verifier_function):
        if name not in VERIFIERS:
            yield Violation(
                f"rl_config.verifier_function.{index}", name, "no such verifier", nearest(name, VERIFIERS)
            )


@rule("rl_config.verifier_function", "rl_config.rule_reward")
def verifiers_are_given_once(cfg: Config) -> Found:
    names = cfg.rl_config.verifier_function
    if cfg.rl_config.rule_reward and not names:
        message = "rule_reward: true needs at least one verifier"
        hint = "for example [math_verify]; or rule_reward: false with a reward model, reward_config.load"
        yield Violation("rl_config.verifier_function", names, message, hint)
    elif len(set(names)) < len(names):
        hint = "name it once and give it the sum of the weights"
        yield Violation("rl_config.verifier_function", names, "names a verifier twice", hint)


@rule("rl_config.verifier_function", "rl_config.verifier_weight", "rl_config.rule_reward")
def one_weight_per_verifier(cfg: Config) -> Found:
    names, weights = cfg.rl_config.verifier_function, cfg.rl_config.verifier_weight
    if cfg.rl_config.rule_reward and len(names) != len(weights):
        message = f"has {len(weights)} weights for {len(names)} verifiers, rl_config.verifier_function = {names!r}"
        yield Violation("rl_config.verifier_weight", weights, message, f"for example {[1.0] * len(names)}")


@rule(
    "rl_config.verifier_function",
    "rl_config.source_verifier_weight",
    "rl_config.filter_groups_metric",
    "rl_config.rule_reward",
    "reward_config.load",
)
def sources_weigh_verifiers_that_run(cfg: Config) -> Found:
    names, metrics = scorers(cfg), (cfg.rl_config.filter_groups_metric, cfg.rl_config.val_metric)
    for source, weights in cfg.rl_config.source_verifier_weight.items():
        path = f"rl_config.source_verifier_weight.{source}"
        if not any(weights.values()):
            yield Violation(path, weights, "gives no verifier a weight", f"for example {{{(*names, '…')[0]}: 1.0}}")
        for name, weight in weights.items():
            if name not in names:
                yield Violation(f"{path}.{name}", weight, "is not in verifier_function", nearest(name, names))
        for metric in metrics:
            if metric != "reward" and metric in names and metric not in weights:
                message = f"leaves out {metric}, by which groups are filtered or responses called right"
                yield Violation(path, weights, message, f"give it the weight 0, which has it run: {metric}: 0")


@rule("rl_config.verifier_function", "rl_config.custom_reward_function")
def custom_reward_is_complete(cfg: Config) -> Found:
    custom, path = cfg.rl_config.custom_reward_function, "rl_config.custom_reward_function"
    if cfg.rl_config.rule_reward and "custom" in cfg.rl_config.verifier_function and custom is None:
        hint = "set it to {path: my_reward.py, name: compute_score}"
        yield Violation(path, None, "the verifier `custom` needs a file and a function name", hint)
    if "custom" not in cfg.rl_config.verifier_function and custom is not None:
        hint = "add custom to rl_config.verifier_function"
        yield Violation(path, custom.path, "is set, but no verifier calls it", hint)


# ---------------------------------------------------------------- logging


@rule("rl_config.use_wandb", *(f"rl_config.wandb_{key}" for key in ("project", "exp_name", "save_dir")))
def wandb_keys_are_used(cfg: Config) -> Found:
    for key in ("wandb_project", "wandb_exp_name", "wandb_save_dir"):
        value = getattr(cfg.rl_config, key)
        if value and not cfg.rl_config.use_wandb:  # templates commonly carry an empty string
            yield Violation(f"rl_config.{key}", value, "is set, but use_wandb = False", "set use_wandb: true")


@rule("rl_config.use_wandb", "rl_config.use_swanlab", "rl_config.use_mlflow")
def trackers_are_installed(cfg: Config) -> Found:
    for package in ("wandb", "swanlab", "mlflow"):
        if getattr(cfg.rl_config, f"use_{package}") and importlib.util.find_spec(package) is None:
            hint = f"pip install 'mindspeed_rl[{package}]'"
            yield Violation(f"rl_config.use_{package}", True, f"the package {package} is not installed", hint)


# ---------------------------------------------------------------- devices


@rule("device", "actor.bf16", "generate_config.dtype")
def cpu_computes_in_float32(cfg: Config) -> Found:
    if cfg.device != "cpu":
        return
    if cfg.actor.bf16:
        yield Violation(actor_path(cfg, "bf16"), True, "device = 'cpu' trains in float32 only", "set bf16: false")
    if cfg.generate_config.dtype != "float32":
        message = "device = 'cpu' generates in float32 only"
        yield Violation("generate_config.dtype", cfg.generate_config.dtype, message, "set dtype: float32")


# ---------------------------------------------------------------- accepted names whose effect is not built


def _refuse(path: str, allowed: Any, reason: str) -> None:
    """Register a rule that refuses any value but `allowed`: a key is never accepted and ignored."""
    section, _, key = path.partition(".")

    def find(cfg: Config) -> Found:
        value = getattr(cfg.actor if section == "actor" else getattr(cfg, section), key)
        if value != allowed:
            shown = actor_path(cfg, key) if section == "actor" else path
            text = str(allowed).lower() if isinstance(allowed, bool) else str(allowed)
            yield Violation(shown, value, reason, f"set it to {text}")

    RULES.append(Rule(f"refuse_{key}", (path,), find))


_LATER = "not supported by this version"
_refuse("generate_config.infer_pipeline_parallel_size", 1, _LATER)
_refuse("generate_config.num_scheduler_steps", 1, "vLLM's V1 engine schedules at every step and has no such setting")
_refuse("rl_config.use_remove_padding", True, "training input is always packed, without padding")
