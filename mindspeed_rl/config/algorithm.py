"""Keys of `rl_config` that say what is trained for: advantages, losses, KL, correction of the rollout's policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_rl.config.section import Fraction, NonNegative, Positive, Section, Share, Switch

ADV_ESTIMATORS = (
    "group_norm",
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "remax",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
)
COV_LOSSES = ("clip_cov", "kl_cov")  # select tokens by covariance, over the whole mini-batch
LOSS_TYPES = ("ppo", "gspo", "cispo", "sapo", "gmpo", *COV_LOSSES)
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")  # estimators
FULL_KL = "full"  # no estimate: the KL over the whole vocabulary


class AlgorithmConfig(Section):
    """See docs/algorithms.md for formulas and papers."""

    adv_estimator: str = Field("group_norm", description=f"advantage estimator: {', '.join(ADV_ESTIMATORS)}")
    norm_adv_by_std: Switch = Field(
        True, description="group_norm and grpo_passk: divide by the group's deviation; false: Dr. GRPO"
    )
    gamma: Fraction = Field(1.0, description="reward discount factor of reinforce_plus_plus and gae")
    lam: Fraction = Field(0.95, description="lambda of gae")
    cliprange_value: Positive = Field(
        0.5, description="gae: a value's loss does not fall by moving it further than this from the old one"
    )
    critic_shares_actor: Switch = Field(
        False,
        description="gae: the critic is a head on the actor's layers, and one optimizer step trains both; false: a "
        "model of its own",
    )
    value_loss_coef: Positive = Field(0.5, description="with `critic_shares_actor`: what the value loss weighs")
    critic_warmup: Annotated[int, Field(ge=0)] = Field(
        0, description="gae: first iterations, in which the critic trains alone"
    )
    loss_type: str = Field("ppo", description=f"policy loss: {', '.join(LOSS_TYPES)}")
    clip_ratio: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="policy ratio is clipped to 1 ± this")
    clip_higher_enable: Switch = Field(False, description="clip to 1 − clip_ratio_low … 1 + clip_ratio_high")
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="with `clip_higher_enable`: how far the ratio may fall"
    )
    clip_ratio_high: Positive | None = Field(
        None, description="with `clip_higher_enable`: how far the ratio may rise"
    )
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = Field(
        None, description="ppo: where the advantage A is negative, the loss is at most -A times this (dual clip)"
    )
    sapo_tau_pos: Positive = Field(1.0, description="sapo: temperature of the gate for positive advantages")
    sapo_tau_neg: Positive = Field(1.05, description="sapo: temperature of the gate for others")
    clip_cov_ratio: Share = Field(0.0002, description="clip_cov: share of the tokens that do not train")
    clip_cov_lb: float = Field(1.0, description="clip_cov: smallest covariance of such a token")
    clip_cov_ub: float = Field(5.0, description="clip_cov: largest covariance of such a token")
    kl_cov_ratio: Share = Field(0.0002, description="kl_cov: share of the tokens that are held back")
    kl_cov_coef: Positive = Field(1.0, description="kl_cov: weight of the KL that holds them back")
    early_stop_imp_ratio: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="an update in which the mean policy ratio is above this is not made, nor any later one of the "
        "iteration",
    )
    kl_penalty: str = Field(
        "low_var_kl",
        description=f"estimator of the KL divergence to the reference: {', '.join(KL_PENALTIES)}; with + behind its "
        f"name, as a loss, it has the gradient of k2; or {FULL_KL}: the KL itself, over the whole vocabulary",
    )
    use_kl_in_reward: Switch = Field(False, description="KL is taken off the tokens' rewards, not added to the loss")
    kl_ctrl_type: Literal["fixed", "adaptive"] = Field("fixed", description="controller of the KL coefficient")
    init_kl_coef: NonNegative = Field(0.001, description="(initial) KL coefficient; 0: no reference model is kept")
    kl_target: Positive = Field(0.1, description="target KL of the adaptive controller")
    kl_horizon: Positive = Field(10000, description="horizon, in sequences, of the controller")
    custom_algorithm_file: str | None = Field(
        None, description="Python file that registers further estimators or losses (docs/algorithms.md)"
    )
    recompute_logprobs: Switch = Field(
        True,
        description="log-probs before the update by the training engine; false: those that rollout reported",
    )
    rollout_is: Literal["off", "stale", "all"] = Field(
        "stale",
        description="tokens whose policy loss is weighted by their probability in training over that in rollout: "
        "none; those that an older policy than the one being trained has sampled; all",
    )
    rollout_is_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="weights of tokens, of whole sequences (product), or of sequences by the geometric mean"
    )
    rollout_is_mode: Literal["truncate", "mask"] = Field(
        "truncate", description="weights beyond the threshold become it, or their tokens do not train"
    )
    rollout_is_threshold: Annotated[float, Field(gt=1)] = Field(2.0, description="largest importance weight")
    rollout_is_threshold_lower: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="mask: smallest importance weight; null: 1 / rollout_is_threshold"
    )
    rollout_is_veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="sequences with a token whose own weight is below this do not train; null: none"
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        Field("token-mean", description="how token losses become one number; counts are of the global mini-batch")
    )
    entropy_coeff: float = Field(0.0, description="weight of the entropy bonus")
