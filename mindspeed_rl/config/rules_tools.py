"""Rules on tools that the model may call."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.files import actor_path
from mindspeed_rl.config.layout import uses_critic, uses_greedy_baseline
from mindspeed_rl.config.rule import MAX_TOKENS, TOTAL, Found, nearest, rule
from mindspeed_rl.config.schema import Config
from mindspeed_rl.config.tools import BUILT_IN

_TOOLS = "tools_config.tools"


@rule("tools_config")
def tools_keys_are_used(cfg: Config) -> Found:
    tools = cfg.tools_config
    for key in sorted(tools.model_fields_set - {"tools"}):
        if not tools.enabled and getattr(tools, key) is not None:
            message = "has no effect without tools"
            yield Violation(
                f"tools_config.{key}", getattr(tools, key), message, f"name some in {_TOOLS}, or remove it"
            )
    for key, tool in {"search_url": "search", "python_memory_mib": "python"}.items():
        value = getattr(tools, key)
        if tools.enabled and key in tools.model_fields_set and value is not None and tool not in tools.tools:
            message = f"is of the tool {tool}, which is not in {_TOOLS} = {tools.tools!r}"
            yield Violation(f"tools_config.{key}", value, message, f"add {tool}, or remove it")


@rule(_TOOLS, "tools_config.tool_file", "tools_config.search_url")
def tools_are_known(cfg: Config) -> Found:
    tools = cfg.tools_config
    for index, name in enumerate(tools.tools):
        if tools.tools.index(name) < index:
            yield Violation(f"{_TOOLS}.{index}", name, "is named twice", "name it once")
        elif name not in BUILT_IN and tools.tool_file is None:
            yield Violation(f"{_TOOLS}.{index}", name, "no such tool, and no tool_file", nearest(name, BUILT_IN))
    if "search" in tools.tools and tools.search_url is None and tools.tool_file is None:
        message = "is needed by the tool search"
        yield Violation("tools_config.search_url", None, message, "set it to the endpoint that answers queries")


@rule(_TOOLS, TOTAL, MAX_TOKENS)
def turns_have_room(cfg: Config) -> Found:
    total, turn = cfg.tools_config.max_total_response_length, cfg.generate_config.sampling_config.max_tokens
    if cfg.tools_config.enabled and (total is None or total <= turn):
        message = f"all turns and answers of tools together need more than one turn, {MAX_TOKENS} = {turn}"
        yield Violation(TOTAL, total, message, f"for example {4 * turn}")


@rule(_TOOLS, "actor.apply_chat_template", "actor.stage")
def tools_are_announced(cfg: Config) -> Found:
    if cfg.tools_config.enabled and cfg.is_supervised:
        message = f"stage = {cfg.actor.stage!r} generates nothing, so no tool is called"
        yield Violation(_TOOLS, cfg.tools_config.tools, message, "remove it")
    elif cfg.tools_config.enabled and not cfg.actor.apply_chat_template:
        message = "tools are announced, and their answers given, by the chat template"
        yield Violation(actor_path(cfg, "apply_chat_template"), False, message, "set it to true")


@rule(
    _TOOLS,
    "rl_config.partial_rollout_max_split",
    "rl_config.adv_estimator",
    "actor.val_data_path",
    "reward_config.load",
    "generate_config.sampling_config",
)
def tools_go_with_the_rest(cfg: Config) -> Found:
    """What takes a response for one stretch of generated tokens."""
    tools, rl, sampling = cfg.tools_config.tools, cfg.rl_config, cfg.generate_config.sampling_config
    if not tools:
        return
    why = f"does not go with {_TOOLS} = {tools!r} in this version: "
    if rl.partial_rollout_max_split > 1:
        message = why + "responses are generated within an iteration"
        yield Violation("rl_config.partial_rollout_max_split", rl.partial_rollout_max_split, message, "set it to 1")
    if uses_greedy_baseline(cfg) or uses_critic(cfg):
        message = why + "greedy responses and values are of one turn"
        yield Violation("rl_config.adv_estimator", rl.adv_estimator, message, "for example group_norm")
    if cfg.actor.val_data_path:
        message = why + "validation has no tools"
        yield Violation(actor_path(cfg, "val_data_path"), cfg.actor.val_data_path, message, "remove it")
    if cfg.reward_config.load:
        message = why + "a reward model reads one turn"
        yield Violation("reward_config.load", cfg.reward_config.load, message, "score with verifiers")
    for key, reason in {"detokenize": "texts are of one turn", "ignore_eos": "turns would not end"}.items():
        if getattr(sampling, key):
            path = f"generate_config.sampling_config.{key}"
            yield Violation(path, True, why + reason, "set it to false")
