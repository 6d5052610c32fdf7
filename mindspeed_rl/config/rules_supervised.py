"""Rules on stages that learn from given responses, on which keys those read, and on learning-rate schedules."""

from __future__ import annotations

from math import prod

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.layout import model_parallel
from mindspeed_rl.config.rule import CP, PP, TP, WORLD, Found, Rule, rule
from mindspeed_rl.config.schema import Config
from mindspeed_rl.config.supervised import GENERATE_KEYS, RESPONSES, RL_KEYS

STAGE = "actor.stage"
COLUMNS = ("prompt_key", "answer_key")
# what is refused here, and whose null means what is so: rules that read it are about other keys, too
ABSENT = "rl_config.rollout_resource"
DYNAMIC, PACKING = "rl_config.use_dynamic_bsz", "rl_config.max_packing_token_size"


def applies(each: Rule, cfg: Config) -> bool:
    """Whether the stage has all keys that a rule reads; what is not read has nothing to be right about."""
    return not cfg.is_supervised or all(key == ABSENT or _is_read(key) for key in each.keys)


def _is_read(key: str) -> bool:
    section, _, name = key.partition(".")
    name = name.partition(".")[0]
    known = {"rl_config": RL_KEYS, "generate_config": GENERATE_KEYS, "critic_config": (), "reward_config": ()}
    return section not in known or name in known[section]


def needs_rollout(cfg: Config, command: str) -> None:
    """Refuse a stage that does not generate, for a command that is about generation.

    Raises:
        ConfigError: it is one.
    """
    if cfg.is_supervised:
        message = f"has no rollout, which {command} is about"
        hint = "use the configuration of a ray_ stage; its load may be what this one has trained"
        raise ConfigError([Violation(actor_path(cfg, "stage"), cfg.actor.stage, message, hint)])


@rule(STAGE, "sft_config.messages_key")
def keys_belong_to_the_stage(cfg: Config) -> Found:
    stage = cfg.actor.stage
    sections = {
        "rl_config": cfg.rl_config,
        "generate_config": cfg.generate_config,
        "critic_config": cfg.critic_config,
        "reward_config": cfg.reward_config,
    }
    unread = []
    if cfg.is_supervised:
        unread = [f"{name}.{key}" for name, section in sections.items() for key in sorted(section.model_fields_set)]
        unread = [path for path in unread if not _is_read(path)]
        if cfg.profiler.model_fields_set & {"what"} and cfg.profiler.what != ["update"]:
            unread.append("profiler.what")
    unread += _unread_columns(cfg)
    unread += [
        f"{kind}_config.{key}"
        for kind in ("sft", "dpo")
        if stage != kind
        for key in sorted(getattr(cfg, f"{kind}_config").model_fields_set)
    ]
    for path in unread:
        section, _, key = path.partition(".")
        message = f"has no effect with stage = {stage!r}"
        if key in COLUMNS and cfg.sft_config.messages_key is not None:
            message = "has no effect with sft_config.messages_key"
        yield Violation(path, getattr(getattr(cfg, section), key), message, "remove it")


def _unread_columns(cfg: Config) -> list[str]:
    """Columns that are named, of rows that consist of others: both answers to a prompt, or a conversation."""
    keys = {"dpo": ("answer_key",), "sft": COLUMNS if cfg.sft_config.messages_key is not None else ()}
    sections = ("megatron_training", "actor_config")
    named = {name: getattr(cfg, name).model_fields_set for name in sections}
    return [f"{name}.{key}" for name in sections for key in keys.get(cfg.actor.stage, ()) if key in named[name]]


@rule(STAGE, "actor.global_batch_size", WORLD, TP, CP, PP)
def rows_fill_ranks(cfg: Config) -> Found:
    batch, ranks = cfg.actor.global_batch_size, cfg.rl_config.actor_resource.num_npus // prod(model_parallel(cfg))
    if cfg.is_supervised and ranks and batch % ranks:
        message = f"rows cannot be shared evenly by {ranks} data-parallel ranks (devices / (TP x CP x PP))"
        yield Violation(actor_path(cfg, "global_batch_size"), batch, message, f"a multiple of {ranks} always fits")


@rule(STAGE, "actor.micro_batch_size", DYNAMIC)
def pairs_stay_together(cfg: Config) -> Found:
    size = cfg.actor.micro_batch_size
    if cfg.actor.stage == "dpo" and not cfg.rl_config.use_dynamic_bsz and size % 2:
        message = "sequences are no whole number of pairs, a chosen and a rejected response"
        yield Violation(actor_path(cfg, "micro_batch_size"), size, message, f"for example {size + 1}")


@rule(STAGE, "actor.micro_batch_size", DYNAMIC, PACKING, "actor.seq_length")
def packing_holds_a_row(cfg: Config) -> Found:
    if not cfg.is_supervised:
        return
    size, is_dynamic = cfg.rl_config.max_packing_token_size, cfg.rl_config.use_dynamic_bsz
    longest = cfg.actor.seq_length * RESPONSES[cfg.actor.stage]
    if is_dynamic and (size is None or size < longest):
        message = f"must hold a row of {longest} tokens: actor_config.seq_length"
        message += ", of both responses" if cfg.actor.stage == "dpo" else ""
        yield Violation(PACKING, size, message, f"at least {longest}")
    if not is_dynamic and size is not None:
        hint = "set use_dynamic_bsz: true, or remove it"
        yield Violation(PACKING, size, "is used with use_dynamic_bsz = True only, which is False", hint)
    for section in ("megatron_training", "actor_config"):
        if is_dynamic and "micro_batch_size" in getattr(cfg, section).model_fields_set:
            message = "has no effect: use_dynamic_bsz = True limits micro-batches by max_packing_token_size"
            value = getattr(cfg, section).micro_batch_size
            yield Violation(f"{section}.micro_batch_size", value, message, "remove it, or set use_dynamic_bsz: false")


@rule(STAGE, "actor.truncation")
def rows_are_cut_at_an_end(cfg: Config) -> Found:
    if cfg.is_supervised and cfg.actor.truncation == "middle":
        message = "would cut between prompt and response"
        yield Violation(actor_path(cfg, "truncation"), "middle", message, "left, right, drop or error")


@rule(STAGE, "sft_config.messages_key", "actor.apply_chat_template")
def conversations_need_the_template(cfg: Config) -> Found:
    key = cfg.sft_config.messages_key
    if cfg.actor.stage == "sft" and key is not None and not cfg.actor.apply_chat_template:
        message = "messages become text by a chat template, and apply_chat_template is False"
        yield Violation("sft_config.messages_key", key, message, "set apply_chat_template: true")


@rule("dpo_config.label_smoothing", "dpo_config.loss_type")
def label_smoothing_is_used(cfg: Config) -> Found:
    dpo = cfg.dpo_config
    if dpo.label_smoothing and dpo.loss_type != "sigmoid":
        message = f"is of loss_type = 'sigmoid', which is {dpo.loss_type!r}"
        yield Violation("dpo_config.label_smoothing", dpo.label_smoothing, message, "set it to 0")


@rule("actor.lr_decay_style", "actor.lr_wsd_decay_fraction", "actor.lr_wsd_decay_style", "actor.lr_warmup_fraction")
def schedule_is_complete(cfg: Config) -> Found:
    actor = cfg.actor
    fraction, path = actor.lr_wsd_decay_fraction, actor_path(cfg, "lr_wsd_decay_fraction")
    if actor.lr_decay_style == "WSD":
        if fraction is None:
            yield Violation(path, None, "is needed with lr_decay_style = 'WSD'", "for example 0.1")
        elif fraction + actor.lr_warmup_fraction > 1:
            message = f"and lr_warmup_fraction = {actor.lr_warmup_fraction} are together more than all steps"
            yield Violation(path, fraction, message, f"at most {1 - actor.lr_warmup_fraction:g}")
        return
    for key in ("lr_wsd_decay_fraction", "lr_wsd_decay_style"):
        if any(key in section.model_fields_set for section in (cfg.megatron_training, cfg.actor_config)):
            message = f"is of lr_decay_style = 'WSD', which is {actor.lr_decay_style!r}"
            yield Violation(actor_path(cfg, key), getattr(actor, key), message, "remove it")
