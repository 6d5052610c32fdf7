"""Keys of `rl_config` that say when a run is validated, and of `generate_config` that say how."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mindspeed_rl.config.section import Count, NonNegative, Section, Switch

Interval = Annotated[int, Field(ge=0)]


class ValidationConfig(Section):
    """Part of `RLConfig`; the data are `val_data_path`."""

    test_freq: Interval = Field(
        0, description="iterations between validations on `val_data_path`; the last one is validated too; 0: none"
    )
    val_before_train: Switch = Field(False, description="validate before the first iteration, too, as step 0")
    val_metric: str = Field(
        "reward",
        description="what pass@k and maj@k go by: a response is right if this is above 0; `reward`, or a verifier of "
        "verifier_function",
    )
    log_val_generations: Interval = Field(0, description="responses of a validation that are logged as samples")


class ValidationSamplingConfig(Section):
    """Keys of `generate_config.val_sampling_config`; what it lacks is as in `sampling_config`."""

    n: Count = Field(1, description="responses to each prompt")
    temperature: NonNegative = Field(0.0, description="logits are divided by it; 0: always the likeliest token")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="sample from the most likely tokens that together have this probability"
    )
    top_k: Annotated[int, Field(ge=-1)] = Field(-1, description="sample from so many most likely tokens; -1: all")
    max_tokens: Count | None = Field(None, description="longest response in tokens; null: as in training")
