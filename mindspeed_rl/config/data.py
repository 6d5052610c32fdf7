"""Keys of `megatron_training` that say what a run reads: files, columns, tokenizer, order."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from mindspeed_rl.config.section import Count, Positive, Section, Switch


class CustomDatasetConfig(Section):
    """A data set of the user's: a class in a Python file, see docs/data.md."""

    path: str = Field(description="Python file")
    name: str = Field("Dataset", description="name of the class in it")


class CustomSamplerConfig(Section):
    """An order of rows of the user's: a class in a Python file, see docs/data.md."""

    path: str = Field(description="Python file")
    name: str = Field("Sampler", description="name of the class in it")


class DataConfig(Section):
    """Part of `MegatronConfig`."""

    data_path: str | list[str] | None = Field(None, description="jsonl/parquet files, or a preprocessed prefix")
    train_max_samples: Count | None = Field(None, description="use so many prompts, the first that fit; null: all")
    custom_dataset: CustomDatasetConfig | None = Field(
        None, description="what reads `data_path` in place of us; null: each line or row of the files is a prompt"
    )
    val_data_path: str | list[str] | None = Field(
        None, description="what to validate on (`test_freq`), with the keys of `data_path`; null: nothing"
    )
    val_max_samples: Count | None = Field(
        None, description="validate on so many prompts, the first that fit; null: all"
    )
    prompt_key: str = Field("prompt", description="column of the prompt: text, or a list of chat messages")
    answer_key: str = Field("answer", description="column of the reference answer")
    data_source_key: str = Field(
        "data_source", description="column that names where a row comes from, for metrics; absent: its file does"
    )
    truncation: Literal["drop", "error", "left", "right", "middle"] = Field(
        "drop",
        description="what happens to prompts of more than max_prompt_length tokens: they are left out and counted, "
        "an error, or shortened: `left` takes tokens away at the beginning, `right` at the end, `middle` between",
    )
    num_workers: Count = Field(1, description="processes that template and tokenise prompts; the result is the same")
    tokenizer_name_or_path: str | None = Field(None, description="Hugging Face folder that holds the tokenizer")
    use_fast_tokenizer: Switch = Field(
        True,
        description="the tokenizer in Rust; false needs transformers 4, as of NPUs, and is refused by later versions",
    )
    apply_chat_template: Switch = Field(False, description="wrap the prompt in the tokenizer's chat template")
    chat_template: str | None = Field(
        None, description="with apply_chat_template: a file with the template to use in place of the tokenizer's"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="with apply_chat_template: what the template gets, such as `enable_thinking: false`"
    )
    system_prompt: str | None = Field(None, description="system message put first when a chat template is applied")
    data_source_weights: dict[str, Positive] | None = Field(
        None,
        description="shares of sources among the rows that are used, such as `{gsm8k: 2, code: 1}`; sources that are "
        "not named are not used; null: every row once an epoch, wherever it comes from",
    )
    custom_sampler: CustomSamplerConfig | None = Field(
        None, description="what chooses rows in place of us; null: see no_shuffle and data_source_weights"
    )
    no_shuffle: Switch = Field(False, description="keep the data set's order instead of shuffling every epoch")
    data_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="seed of the order of data; null: `seed`"
    )

    def of_validation(self) -> Self:
        """With the keys of validation in place of those of training."""
        return self.model_copy(update={"data_path": self.val_data_path, "train_max_samples": self.val_max_samples})
