"""Examples that break the rules on data, as in `test_rules.py`."""

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
DATA_EXAMPLES = {
    "rows_are_chosen_in_one_way": (
        ["megatron_training.custom_sampler={path: mine.py}", "megatron_training.data_source_weights={a: 1}"],
        "megatron_training.data_source_weights", {"a": 1.0}, "with custom_sampler, which chooses", "one of the two",
    ),
    "template_keys_need_the_template": (
        ["actor_config.system_prompt='Be brief.'", "megatron_training.apply_chat_template=false"],
        "actor_config.system_prompt", "Be brief.", "apply_chat_template = False", "apply_chat_template: true",
    ),
    "an_order_is_drawn": (
        ["megatron_training.data_seed=7", "megatron_training.no_shuffle=true"],
        "megatron_training.data_seed", 7, "no_shuffle = True", "remove one",
    ),
}  # fmt: skip
