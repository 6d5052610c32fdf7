"""The columns that samples gather on their way through a step, and the stages that consume them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import (
    Layout,
    scored_stages,
    shares_critic,
    tokens_may_be_stale,
    uses_critic,
    uses_greedy_baseline,
    uses_old_log_probs,
    uses_reference_log_probs,
    uses_reward_model,
)
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.packing import balanced_partition, sequence_costs
from mindspeed_rl.transfer_dock.spec import ColumnSpec, ConsumerSpec, DockSpec, Filter, Selection

TOKENS = ColumnSpec(dtype="int64", kind="jagged")
PER_TOKEN = ColumnSpec(dtype="float32", kind="jagged")
SCALAR = ColumnSpec(dtype="float32", kind="scalar")
OBJECT = ColumnSpec(dtype="object", kind="object")
STATE = ColumnSpec(dtype="object", kind="object", replaceable=True)

COLUMNS = {
    "prompt_ids": TOKENS,  # the prompt, shared by its group
    "sample": OBJECT,  # PromptSample: text, label and source, shared by the group
    "responses": TOKENS,  # generated ids: exactly these are trained on
    "response_mask": PER_TOKEN,  # with tools: 1 generated, 0 what a tool answered
    "tool_use": OBJECT,  # ToolUse
    "rollout_log_probs": PER_TOKEN,  # of the policy that generated, by the rollout engine
    "policy_versions": TOKENS,  # of the policy that generated each token: iterations it was trained for
    "partial": STATE,  # PartialResponse: an unfinished response, which the next iteration goes on with
    "texts": OBJECT,  # responses as text, where the rollout engine decodes them
    "baseline_responses": TOKENS,  # greedy ids, in the first row of a group; nothing in the others
    "baseline_texts": OBJECT,  # those as text, where the rollout engine decodes them
    "reward_model_scores": SCALAR,  # NaN: it gave none
    "rewards": SCALAR,  # weighted sum of verifiers and reward model; NaN: scoring failed
    "baseline_rewards": SCALAR,  # that of the greedy response, in every row of the group
    "reference_log_probs": PER_TOKEN,
    "old_log_probs": PER_TOKEN,  # of the policy before this iteration's updates, by the training engine
    "values": PER_TOKEN,  # of the critic before this iteration's updates
    "returns": PER_TOKEN,  # what those should have been
    "advantages": PER_TOKEN,
    "loss_mask": PER_TOKEN,  # 1: the token counts in the loss
}


@dataclass(frozen=True)
class ScoringStage:
    """A stage in which an engine computes log-probs, or values, of responses."""

    columns: dict[str, str]  # what it puts into the dock: column -> which of the engine's `TokenOutputs`
    timing: str  # MindSpeed RL's name of its time


def uses_partial_rollout(config: Config) -> bool:
    """True if an iteration may end before all of its responses are complete."""
    return config.rl_config.partial_rollout_max_split > 1


def selection(config: Config) -> Selection | Filter | None:
    """Which groups of an iteration are trained on, if not all."""
    rl, prompts = config.rl_config, config.actor.global_batch_size
    if rl.filter_groups_enable:
        return Filter(prompts)
    if uses_partial_rollout(config):
        return Selection(prompts, rl.partial_rollout_max_split, rl.require_max_age_all_finished)
    return None


def old_log_probs_column(config: Config) -> str:
    """Where log-probs of the policy before the update are, if any stage needs them beside the training pass."""
    return "old_log_probs" if config.rl_config.recompute_logprobs else "rollout_log_probs"


def advantage_columns(config: Config) -> tuple[str, ...]:
    """What advantages are computed from."""
    kl = ("reference_log_probs", old_log_probs_column(config)) if config.rl_config.use_kl_in_reward else ()
    baseline = ("baseline_rewards",) if uses_greedy_baseline(config) else ()
    mask = ("response_mask",) if config.tools_config.enabled else ()
    return ("rewards", "responses", *mask, *baseline, *kl, *(("values",) if uses_critic(config) else ()))


def advantage_results(config: Config) -> tuple[str, ...]:
    """What is computed then."""
    return ("advantages", "loss_mask", *(("returns",) if uses_critic(config) else ()))


def scoring_stages(config: Config) -> dict[str, ScoringStage]:
    """Those that this run needs, in their order."""
    of_actor = {"old_log_probs": "log_probs"} if uses_old_log_probs(config) else {}
    if shares_critic(config):
        of_actor["values"] = "values"
    stages = {
        REWARD_MODEL: ScoringStage({"reward_model_scores": "values"}, "reward_model"),
        "reference": ScoringStage({"reference_log_probs": "log_probs"}, "reference_model"),
        "value": ScoringStage({"values": "values"}, "values"),
        "old_log_prob": ScoringStage(of_actor, "old_log_p"),
    }
    return {name: stages[name] for name in scored_stages(config)}


def update_columns(config: Config) -> tuple[str, ...]:
    """Per-token columns that the update needs, in a fixed order."""
    optional = {
        "reference_log_probs": uses_reference_log_probs(config),
        "old_log_probs": uses_old_log_probs(config),
        "rollout_log_probs": bool(config.generate_config.sampling_config.logprobs),
        "policy_versions": tokens_may_be_stale(config),
        "values": uses_critic(config),
        "returns": uses_critic(config),
    }
    return ("advantages", "loss_mask", *(name for name, used in optional.items() if used))


def dock_spec(config: Config, layout: Layout) -> DockSpec:
    """Columns and consumers of this run."""
    sequences = ("prompt_ids", "responses")
    sampling = config.generate_config.sampling_config
    text = ("texts",) if sampling.detokenize else ()
    tools = ("response_mask", "tool_use") if config.tools_config.enabled else ()
    log_probs = ("rollout_log_probs",) if sampling.logprobs else ()
    versions = ("policy_versions",) if tokens_may_be_stale(config) else ()
    is_partial, is_filtered = uses_partial_rollout(config), config.rl_config.filter_groups_enable
    has_baseline = uses_greedy_baseline(config)
    scores = ("reward_model_scores",) if uses_reward_model(config) else ()
    baseline = ("baseline_responses", *(("baseline_texts",) if sampling.detokenize else ())) if has_baseline else ()
    consumers = {
        "rollout": ConsumerSpec(
            needs=("prompt_ids",),
            shares=layout.rollout_replicas,
            puts=("responses", *tools, *log_probs, *versions, *text, *baseline),
            optional=("partial",) if is_partial else (),
            all_prompts=is_partial or is_filtered,
            max_staleness=config.rl_config.staleness,
        ),
        "reward": ConsumerSpec(
            needs=("sample", "responses", *tools, *scores, *text, *baseline),
            puts=("rewards", *(("baseline_rewards",) if has_baseline else ())),
            grouped=is_filtered or has_baseline,
            all_prompts=is_filtered,
        ),
        **{
            name: ConsumerSpec(
                needs=(*sequences, "sample") if name == REWARD_MODEL else sequences,
                shares=layout.dp,
                puts=tuple(stage.columns),
                all_prompts=is_filtered and name == REWARD_MODEL,
            )
            for name, stage in scoring_stages(config).items()
        },
        "advantage": ConsumerSpec(
            needs=(*advantage_columns(config), "prompt_ids"), grouped=True, puts=advantage_results(config)
        ),
        "update": ConsumerSpec(
            needs=(*sequences, *update_columns(config)),
            shares=layout.dp,
            balance=sequences if balances_update(config, layout) else (),
        ),
    }
    return DockSpec(
        columns=COLUMNS,
        consumers=consumers,
        guarantee_order=config.rl_config.guarantee_order,
        partition=partial(_equal_cost, model=resolve_model(config)),
    )


def balances_update(config: Config, layout: Layout) -> bool:
    """True if mini-batches are shared out by cost; without an order, ranks take what is ready anyway."""
    return config.rl_config.balance_batch and config.rl_config.guarantee_order and layout.dp > 1


def _equal_cost(lengths: np.ndarray, parts: int, model: ModelConfig) -> list[list[int]]:
    return balanced_partition(sequence_costs(lengths.tolist(), model), parts)
