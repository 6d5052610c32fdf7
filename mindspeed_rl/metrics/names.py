"""The metrics a run reports: how each is reduced, its unit and meaning, and MindSpeed RL's names for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rl.common.metric import Reduction


@dataclass(frozen=True)
class MetricInfo:
    """`reduction` is over what `meaning` says; `alias` is MindSpeed RL's name where it differs."""

    reduction: Reduction
    unit: str
    meaning: str
    alias: str | None = None


_TOKENS = "the mini-batches' counted response tokens"

# `{...}` stands for a name that the run's configuration or data provides
METRICS: dict[str, MetricInfo] = {
    "reward/mean": MetricInfo("mean", "", "weighted reward, over scored samples", "grpo/score/mean"),
    "reward/max": MetricInfo("max", "", "weighted reward, over scored samples", "grpo/score/max"),
    "reward/min": MetricInfo("min", "", "weighted reward, over scored samples", "grpo/score/min"),
    "reward/std": MetricInfo("std", "", "weighted reward, over scored samples"),
    "{verifier}_rewards/mean": MetricInfo(
        "mean", "", "score of one verifier, or of the `reward_model`, where it gave one"
    ),
    "{verifier}_rewards/{status}": MetricInfo("sum", "samples", "one verifier's calls that ended so: ok, timeout, …"),
    "reward/source/{source}": MetricInfo("mean", "", "weighted reward, over one data source's scored samples"),
    "reward_status/{status}": MetricInfo("sum", "samples", "all verifiers' calls that ended so"),
    "reward_failed_samples": MetricInfo("sum", "samples", "samples without a reward, left out of training"),
    "reward/baseline_mean": MetricInfo("mean", "", "weighted reward of greedy responses, over prompts that have it"),
    "reward_failed_baselines": MetricInfo(
        "sum", "prompts", "prompts whose greedy response has no reward; their samples are left out of training"
    ),
    "reward/overlong_penalty": MetricInfo("mean", "", "taken off the reward for length, over samples"),
    "reward/zero_variance_groups": MetricInfo("mean", "", "share of prompts whose samples all got the same reward"),
    "reward/filtered_groups": MetricInfo("mean", "", "share of the generated groups that did not qualify"),
    "reward/filled_groups": MetricInfo("sum", "groups", "groups trained on though they did not qualify"),
    "rollout/waves": MetricInfo("sum", "", "times that global_batch_size prompts were generated for the iteration"),
    "response_length/mean": MetricInfo("mean", "tokens", "over samples"),
    "response_length/max": MetricInfo("max", "tokens", "over samples"),
    "response_length/min": MetricInfo("min", "tokens", "over samples"),
    "response_length/total": MetricInfo("sum", "tokens", "over samples"),
    "response_length/clip_fraction": MetricInfo("mean", "", "share of samples as long as a response may be"),
    "tools/calls": MetricInfo("mean", "", "answered calls of tools in a response, over samples"),
    "tools/failed": MetricInfo("mean", "", "those that failed or were malformed, over samples"),
    "tools/timed_out": MetricInfo("mean", "", "those that took longer than tool_timeout, over samples"),
    "tools/tokens": MetricInfo("mean", "tokens", "tokens of a response that are from tools, over samples"),
    "tools/turns": MetricInfo("mean", "", "turns that the model generated for a response, over samples"),
    "tools/turns_max": MetricInfo("max", "", "turns that the model generated for a response, over samples"),
    "prompt_length/mean": MetricInfo("mean", "tokens", "over samples"),
    "prompt_length/max": MetricInfo("max", "tokens", "over samples"),
    "prompt_length/min": MetricInfo("min", "tokens", "over samples"),
    "prompt_length/total": MetricInfo("sum", "tokens", "over samples, a prompt once for each of its responses"),
    "actor/loss": MetricInfo("mean", "", "policy loss, KL and entropy, by loss_agg_mode over tokens or sequences"),
    "actor/pg_loss": MetricInfo("mean", "", "policy loss with its sign, by loss_agg_mode", "actor/policy_loss"),
    "actor/kl": MetricInfo("mean", "nat", "KL to the reference by kl_penalty, mean over tokens", "actor/kl_loss"),
    "actor/kl_coef": MetricInfo("mean", "", "coefficient of the KL term, over updates"),
    "actor/entropy": MetricInfo("mean", "nat", "entropy of the next-token distribution, by loss_agg_mode"),
    "actor/pg_clipfrac": MetricInfo("mean", "", f"share of tokens whose ratio was clipped, over {_TOKENS}"),
    "actor/pg_clipfrac_lower": MetricInfo("mean", "", f"share of tokens at clip_ratio_c, over {_TOKENS}"),
    "actor/cov_fraction": MetricInfo("mean", "", f"share of tokens treated apart by covariance, over {_TOKENS}"),
    "actor/imp_ratio": MetricInfo("mean", "", f"current over old probability, over {_TOKENS}"),
    "actor/early_stopped": MetricInfo("mean", "", "share of updates not made for early_stop_imp_ratio"),
    "actor/ppo_kl": MetricInfo("mean", "nat", f"old minus current log-prob, over {_TOKENS}"),
    "actor/grad_norm": MetricInfo("mean", "", "global gradient norm before clipping, over updates", "grad_norm"),
    "actor/lr": MetricInfo("mean", "", "learning rate, over updates", "lr"),
    "critic/vf_loss": MetricInfo("mean", "", f"value loss, over {_TOKENS}"),
    "critic/vf_clipfrac": MetricInfo("mean", "", f"share of tokens at cliprange_value, over {_TOKENS}"),
    "critic/values": MetricInfo("mean", "", f"value, over {_TOKENS}"),
    "critic/returns": MetricInfo("mean", "", f"return, over {_TOKENS}"),
    "critic/returns_std": MetricInfo("std", "", f"return, over {_TOKENS}"),
    "critic/squared_error": MetricInfo("mean", "", f"(value - return)², over {_TOKENS}"),
    "critic/grad_norm": MetricInfo("mean", "", "global gradient norm before clipping, over updates"),
    "critic/lr": MetricInfo("mean", "", "learning rate, over updates"),
    "sft/loss": MetricInfo("mean", "nat", "negative log-prob, over the tokens that are learned"),
    "sft/perplexity": MetricInfo("exp_mean", "", "perplexity of the tokens that are learned"),
    "sft/tokens": MetricInfo("sum", "tokens", "tokens that are learned"),
    "dpo/loss": MetricInfo("mean", "", "loss of loss_type, over pairs"),
    "dpo/rewards/chosen": MetricInfo("mean", "", "beta times log-ratio to the reference of the chosen response"),
    "dpo/rewards/rejected": MetricInfo("mean", "", "beta times log-ratio to the reference of the rejected one"),
    "dpo/margin": MetricInfo("mean", "", "the former minus the latter, over pairs"),
    "dpo/accuracy": MetricInfo("mean", "", "share of pairs with a margin above 0"),
    "dpo/chosen_nll": MetricInfo("mean", "nat", "negative log-prob, over tokens of chosen responses"),
    "data/epoch": MetricInfo("mean", "epochs", "position in the data set, after the step"),
    "update/imbalance": MetricInfo(
        "mean", "", "largest data-parallel rank's cost of a mini-batch over the ranks' mean, over updates"
    ),
    "rollout/logprob_diff_mean": MetricInfo("mean", "nat", "|training − rollout log-prob|, stale tokens too"),
    "rollout/logprob_diff_max": MetricInfo("max", "nat", "|training − rollout log-prob|, stale tokens too"),
    "rollout/k3": MetricInfo("mean", "nat", "estimate of KL(rollout ‖ training), over tokens"),
    "rollout/ppl_ratio": MetricInfo("exp_mean", "", "perplexity of responses under training / under rollout"),
    "rollout/ess": MetricInfo("ess", "", "effective share of tokens under training-to-rollout weights"),
    "rollout/weight_out_fraction": MetricInfo("mean", "", "share of tokens with such a weight outside [0.5, 2]"),
    "rollout/is_weight": MetricInfo("mean", "", "importance weight of rollout_is, over tokens"),
    "rollout/is_truncated": MetricInfo("mean", "", "share of tokens whose importance weight was truncated"),
    "rollout/is_masked": MetricInfo("mean", "", "share of tokens that do not train for their importance weight"),
    "rollout/is_vetoed": MetricInfo("mean", "", "share of responses that do not train for one token's weight"),
    "rollout/weight_mean": MetricInfo("mean", "", "training-to-rollout weight, over tokens"),
    "rollout/weight_std": MetricInfo("std", "", "training-to-rollout weight, over tokens"),
    "rollout/weight_max": MetricInfo("max", "", "training-to-rollout weight, over tokens"),
    "rollout/weight_min": MetricInfo("min", "", "training-to-rollout weight, over tokens"),
    "rollout/chi2": MetricInfo("mean", "", "estimate of χ²(training ‖ rollout), over tokens"),
    "staleness/mean": MetricInfo("mean", "iterations", "trained iteration minus generating policy, over tokens"),
    "staleness/max": MetricInfo("max", "iterations", "trained iteration minus generating policy, over tokens"),
    "dock/wait/{stage}": MetricInfo("sum", "s", "time a stage waited for rows"),
    "val/{source}/reward/mean": MetricInfo("mean", "", "weighted reward in validation, of one data source or `all`"),
    "val/{source}/failed": MetricInfo("sum", "responses", "that could not be scored in validation"),
    "val/{source}/response_length/mean": MetricInfo("mean", "tokens", "over responses of validation"),
    "val/{source}/pass@{k}": MetricInfo("mean", "", "chance that one of k responses is right, over prompts"),
    "val/{source}/best@{k}": MetricInfo("mean", "", "expected largest value of k responses, over prompts"),
    "val/{source}/maj@{n}": MetricInfo("mean", "", "chance that the most frequent of n answers is right"),
    "val/{source}/{verifier}/mean": MetricInfo("mean", "", "one verifier's score in validation"),
    "val/{source}/loss": MetricInfo("mean", "", "of sft and dpo, on rows of validation; and so are the following"),
    "val/{source}/perplexity": MetricInfo("exp_mean", "", "of the tokens that are learned"),
    "val/{source}/tokens": MetricInfo("sum", "tokens", "tokens that are learned"),
    "val/{source}/rewards/{response}": MetricInfo("mean", "", "as dpo/rewards/…, of chosen or rejected responses"),
    "val/{source}/margin": MetricInfo("mean", "", "as dpo/margin"),
    "val/{source}/accuracy": MetricInfo("mean", "", "share of pairs with a margin above 0"),
    "val/{source}/chosen_nll": MetricInfo("mean", "nat", "as dpo/chosen_nll"),
    "timing/validation": MetricInfo("max", "s", "validation, beside the step"),
    "timing/all": MetricInfo("max", "s", "the whole step"),
    "timing/rollout": MetricInfo("max", "s", "generation"),
    "timing/rule_reward": MetricInfo("max", "s", "scoring"),
    "timing/reward_model": MetricInfo("max", "s", "scores of the reward model"),
    "timing/reference_model": MetricInfo("max", "s", "reference log-probs"),
    "timing/old_log_p": MetricInfo("max", "s", "old log-probs"),
    "timing/values": MetricInfo("max", "s", "values of the critic"),
    "timing/adv": MetricInfo("max", "s", "advantages"),
    "timing/update": MetricInfo("max", "s", "all optimizer steps of the iteration"),
    "timing/resharding_to_infer": MetricInfo("max", "s", "weights from training to rollout"),
    "timing/export_weights": MetricInfo(
        "max", "s", "weights from training to host memory, for rollout apart from it"
    ),
    "timing/validate_weight": MetricInfo("max", "s", "update and check of rollout's weights, with `validate_weight`"),
    "timing/resharding_to_train": MetricInfo("max", "s", "memory from rollout back to training"),
    "timing/offload": MetricInfo("max", "s", "moves between device and host memory"),
    "timing/save": MetricInfo("max", "s", "checkpoint"),
    "throughput/total": MetricInfo("mean", "tokens/s/device", "prompt and response tokens over the step", "e2e_tps"),
    "throughput/update": MetricInfo("mean", "tokens/s/device", "all tokens over the update's time", "update_tps"),
    "throughput/generated": MetricInfo("mean", "tokens/s/device", "response tokens over rollout's time", "vllm_tps"),
    "throughput/longest_sample": MetricInfo("mean", "tokens/s", "longest response over the time of rollout"),
    "throughput/mfu": MetricInfo("mean", "", "model FLOPs of the update over the devices' peak"),
    "memory/device_peak": MetricInfo("max", "GiB", "largest peak of any device in the step"),
    "memory/host_peak": MetricInfo("max", "GiB", "largest peak of any rank's process"),
}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(name)))


_PATTERNS = [(_pattern(name), info) for name, info in METRICS.items()]


def describe(name: str) -> MetricInfo | None:
    """The entry of a reported name, `{...}` filled in; None if it is not in the table."""
    return next((info for pattern, info in _PATTERNS if pattern.fullmatch(name)), None)


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and again under MindSpeed RL's names where those differ."""
    aliases = {info.alias: metrics[name] for name, info in METRICS.items() if info.alias and name in metrics}
    return {**metrics, **aliases}
