"""Keys of `reward_config`: a model that scores responses, beside verifiers or in place of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mindspeed_rl.config.section import Count, Section


class RewardModelConfig(Section):
    """Its layout, precision and devices are the actor's; its shape is that of its `config.json`."""

    load: str | None = Field(
        None,
        description="Hugging Face folder of a sequence classification with one label, whose score is a reward; null: "
        "there is no reward model",
    )
    tokenizer_name_or_path: str | None = Field(
        None,
        description="folder with the reward model's tokenizer; null: `load` has it. If its tokens are the actor's, "
        "and no `chat_template` is set, ids are scored as they were generated; else messages and response are "
        "rendered and tokenised again",
    )
    chat_template: str | None = Field(
        None, description="file with the template to use in place of the one of the reward model's tokenizer"
    )
    micro_batch_size: Count = Field(8, description="sequences a pass when computing the reward model's scores")
    max_length: Count | None = Field(
        None, description="longest prompt + response that it is given, in its tokens; null: what it has positions for"
    )
    truncation: Literal["drop", "left", "right", "middle"] = Field(
        "drop",
        description="what happens to longer ones: they get no reward, are counted and do not train; or they are "
        "shortened: `left` takes tokens away at the beginning, `right` at the end, `middle` between",
    )
