"""Keys of `megatron_training` that say what a run reads: files, columns, tokenizer, order."""

from __future__ import annotations

from pydantic import Field

from mindspeed_rl.config.section import Section, Switch


class DataConfig(Section):
    """Part of `MegatronConfig`."""

    data_path: str | list[str] | None = Field(None, description="jsonl/parquet files, or a preprocessed prefix")
    tokenizer_name_or_path: str | None = Field(None, description="Hugging Face folder that holds the tokenizer")
    prompt_key: str = Field("prompt", description="column of the prompt: text, or a list of chat messages")
    answer_key: str = Field("answer", description="column of the reference answer")
    apply_chat_template: Switch = Field(False, description="wrap the prompt in the tokenizer's chat template")
    system_prompt: str | None = Field(None, description="system message put first when a chat template is applied")
    no_shuffle: Switch = Field(False, description="keep the data set's order instead of shuffling every epoch")
