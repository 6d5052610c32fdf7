"""Keys of stages that learn from given responses: `sft_config`, `dpo_config`, and which others these stages read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_rl.config.section import NonNegative, Positive, Section

RESPONSES = {"sft": 1, "dpo": 2}  # of a row, by stage
STAGES = tuple(RESPONSES)

# keys of `rl_config` that mean the same in these stages; all others are refused there
RL_KEYS = frozenset(
    {
        "use_remove_padding",
        "use_dynamic_bsz",
        "max_packing_token_size",
        "balance_batch",
        "actor_resource",
        "start_timeout_minutes",
        "stage_timeout_minutes",
        "log_max_throughput",
        "use_tensorboard",
        "use_wandb",
        "wandb_project",
        "wandb_exp_name",
        "wandb_save_dir",
        "use_swanlab",
        "use_mlflow",
        "test_freq",
        "val_before_train",
    }
)
GENERATE_KEYS = frozenset({"trust_remote_code"})  # and of `generate_config`


class SFTConfig(Section):
    """Keys of `sft_config`."""

    messages_key: str | None = Field(
        None,
        description="column of a whole conversation, of which what the assistant says is learned, every turn; "
        "null: rows have a prompt (`prompt_key`) and a response (`answer_key`)",
    )


class DPOConfig(Section):
    """Keys of `dpo_config`."""

    chosen_key: str = Field("chosen", description="column of the better response to `prompt_key`")
    rejected_key: str = Field("rejected", description="column of the worse one")
    loss_type: Literal["sigmoid", "ipo", "hinge"] = Field(
        "sigmoid", description="loss of a pair: DPO's own, or that of IPO or SLiC (docs/sft_dpo.md)"
    )
    beta: Positive = Field(0.1, description="how much it costs to leave the reference")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="with `sigmoid`: share of pairs that are taken to be the wrong way round"
    )
    sft_coef: NonNegative = Field(0.0, description="weight of the chosen responses' negative log-prob beside it")
