"""Examples that break the rules on tools, as in `test_rules.py`."""

TOOLS = [
    "tools_config.tools=[calculator]",
    "generate_config.sampling_config.max_tokens=100",
    "tools_config.max_total_response_length=500",
    "megatron_training.apply_chat_template=true",
]

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
TOOLS_EXAMPLES = {
    "tools_keys_are_used": (
        ["tools_config.max_tool_calls=3"],
        "tools_config.max_tool_calls", 3, "no effect without tools", "name some in tools_config.tools",
    ),
    "tools_are_known": (
        [*TOOLS, "tools_config.tools=[calculater]"],
        "tools_config.tools.0", "calculater", "no such tool", "did you mean calculator?",
    ),
    "turns_have_room": (
        [*TOOLS, "tools_config.max_total_response_length=null"],
        "tools_config.max_total_response_length", None, "need more than one turn", "for example",
    ),
    "tools_are_announced": (
        [*TOOLS, "megatron_training.apply_chat_template=false"],
        "megatron_training.apply_chat_template", False, "by the chat template", "set it to true",
    ),
    "tools_go_with_the_rest": (
        [*TOOLS, "rl_config.partial_rollout_max_split=2"],
        "rl_config.partial_rollout_max_split", 2, "does not go with tools_config.tools", "set it to 1",
    ),
}  # fmt: skip
