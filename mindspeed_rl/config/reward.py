"""Keys of `rl_config` that say how responses are scored."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mindspeed_rl.config.section import Count, Positive, Section, Switch

REWARD_MODEL = "reward_model"  # its name among verifiers, and that of its stage
Weight = Annotated[float, Field(allow_inf_nan=False)]


class CustomRewardConfig(Section):
    """A reward function of the user's: `name(prompt, response, label, **extra) -> float` in a Python file."""

    path: str = Field(description="Python file")
    name: str = Field("compute_score", description="name of the function in it")


class RewardConfig(Section):
    """Part of `RLConfig`."""

    rule_reward: Switch = Field(
        True, description="score responses with rules (verifiers); false: with a reward model alone (`reward_config`)"
    )
    reward_model_weight: Weight = Field(
        1.0, description="with `reward_config.load`: what the reward model's score weighs among those of verifiers"
    )
    verifier_function: list[str] = Field(["math_verify"], description="names of the verifiers")
    verifier_weight: list[float] = Field([1.0], description="one weight a verifier; the reward is the weighted sum")
    source_verifier_weight: dict[str, dict[str, Weight]] = Field(
        {},
        description="data source -> verifier, or `reward_model` -> weight: what counts for rows of that source, in "
        "place of verifier_weight and reward_model_weight; others of verifier_function do not run on them",
    )
    reward_scale: Positive = Field(1.0, description="the weighted sum is multiplied by it")
    verifier_timeout: Annotated[float, Field(gt=0)] = Field(10.0, description="seconds a verifier may take a sample")
    verifier_parallel: Count = Field(1, description="processes that run verifiers")
    custom_reward_function: CustomRewardConfig | None = Field(None, description="what the verifier `custom` calls")
    overlong_buffer_enable: Switch = Field(False, description="take off rewards for responses that become too long")
    overlong_buffer: Count | None = Field(
        None, description="tokens before the longest response over which the penalty rises from 0 to its full size"
    )
    overlong_buffer_penalty_factor: Positive = Field(1.0, description="the full penalty")

    @property
    def verifiers(self) -> dict[str, float]:
        """Those that run, and their weights."""
        return dict(zip(self.verifier_function, self.verifier_weight, strict=True)) if self.rule_reward else {}
