"""Examples that break the rules on SFT and DPO, as in `test_rules.py`."""

SFT, DPO = "megatron_training.stage=sft", "megatron_training.stage=dpo"

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
SUPERVISED_EXAMPLES = {
    "keys_belong_to_the_stage": (
        [SFT, "rl_config.gamma=0.9"],
        "rl_config.gamma", 0.9, "has no effect with stage = 'sft'", "remove it",
    ),
    "rows_fill_ranks": (
        [SFT, "megatron_training.global_batch_size=63"],
        "megatron_training.global_batch_size", 63, "shared evenly by 2 data-parallel ranks", "a multiple of 2",
    ),
    "pairs_stay_together": (
        [DPO, "actor_config.micro_batch_size=3"],
        "actor_config.micro_batch_size", 3, "a chosen and a rejected response", "for example 4",
    ),
    "packing_holds_a_row": (
        [DPO, "rl_config.use_dynamic_bsz=true", "actor_config.seq_length=1000"],
        "rl_config.max_packing_token_size", None, "a row of 2000 tokens", "at least 2000",
    ),
    "rows_are_cut_at_an_end": (
        [SFT, "megatron_training.truncation=middle"],
        "megatron_training.truncation", "middle", "between prompt and response", "left, right",
    ),
    "conversations_need_the_template": (
        [SFT, "sft_config.messages_key=messages", "megatron_training.apply_chat_template=false"],
        "sft_config.messages_key", "messages", "by a chat template", "apply_chat_template: true",
    ),
    "label_smoothing_is_used": (
        ["dpo_config.label_smoothing=0.1", "dpo_config.loss_type=ipo"],
        "dpo_config.label_smoothing", 0.1, "is of loss_type = 'sigmoid'", "set it to 0",
    ),
    "schedule_is_complete": (
        ["actor_config.lr_decay_style=WSD"],
        "megatron_training.lr_wsd_decay_fraction", None, "is needed with lr_decay_style = 'WSD'", "for example",
    ),
}  # fmt: skip
