"""Scores responses and turns scores into advantages, beside the devices."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mindspeed_rl.algorithms.advantages import compute_advantages, needs_whole_batch
from mindspeed_rl.algorithms.group_filter import differs_within
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl.algorithms.registry import load_custom_algorithms
from mindspeed_rl.common.logging import setup_logging
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.common.timing import Span, Timings
from mindspeed_rl.config.layout import Layout, uses_greedy_baseline, uses_reward_model
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.prompts import PromptSample
from mindspeed_rl.metrics.evaluation import Evaluated
from mindspeed_rl.rewards.manager import RewardManager, RewardResult
from mindspeed_rl.rewards.verifiers import RewardSample
from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.spec import Claim, TransferDock
from mindspeed_rl.types import ToolUse
from mindspeed_rl.workers.evaluation import evaluate_texts, reward_samples
from mindspeed_rl.workers.stages import old_log_probs_column

logger = logging.getLogger(__name__)


@dataclass
class RewardReport:
    """What scoring says about an iteration."""

    spans: list[Span]
    metrics: MetricSet
    samples: list[dict[str, Any]] = field(default_factory=list)  # a few: prompt, response, label, reward
    sequence_lengths: list[int] = field(default_factory=list)  # tokens, prompt and response, of what is trained on


class RewardWorker:
    """A local (CPU) actor with two stages, `score` and `compute_advantages`.

    They run side by side, also for several iterations: so many calls are in progress at once (`concurrent_calls`).
    """

    SHOWN_SAMPLES = 3
    # while others generate: scoring in parts overlaps with that, but a claim for each group would cost too much
    CLAIMS_PER_ITERATION = 4

    def __init__(
        self, config: Config, layout: Layout, tokenizer: PreTrainedTokenizerBase, dock: TransferDock, log_folder: str
    ):
        setup_logging(log_folder, "reward", capture=True)
        self.config, self.layout, self.tokenizer, self.dock = config, layout, tokenizer, dock
        self.manager = RewardManager(config.rl_config)
        load_custom_algorithms(config.rl_config.custom_algorithm_file)
        self.scoring = threading.Lock()  # of one iteration at a time
        # rollout works iterations off in turn, and their rewards wait side by side; advantages may wait for
        # log-probs, which come after the updates of the iterations before
        self.timeout = 60 * config.rl_config.stage_timeout_minutes * (1 + 3 * config.rl_config.staleness)

    def _claim(self, consumer: str, timings: Timings) -> Claim | None:
        rows, group = self.layout.sequences_per_iteration, self.config.rl_config.n_samples_per_prompt
        parts = 1 if self.config.rl_config.blocking else self.CLAIMS_PER_ITERATION
        count = math.ceil(rows / parts / group) * group
        with timings.waiting(consumer):
            return self.dock.claim(consumer, timings.iteration, count, timeout=self.timeout)

    def score(self, iteration: int) -> RewardReport:
        """Score all responses of the iteration, greedy ones too; what cannot be scored gets NaN and is counted."""
        timings = Timings(iteration)
        report, scored_by_model = RewardReport(timings.spans, MetricSet()), uses_reward_model(self.config)
        while (claim := self._claim("reward", timings)) is not None:
            with timings("rule_reward"):
                columns = self.dock.get(claim, self.dock.spec.consumers["reward"].needs)
                scores = [float(score) for score in columns["reward_model_scores"]] if scored_by_model else None
                samples, firsts = self._samples(columns, range(len(claim))), self._with_baseline(claim)
                with self.scoring:
                    result = self.manager.score(samples + self._samples(columns, firsts, "baseline_"), scores)
                penalties = [self._overlong_penalty(len(response)) for response in columns["responses"]]
                of_samples = result.total[: len(samples)]
                rewards = [reward - penalty for reward, penalty in zip(of_samples, penalties, strict=True)]
                results, compared = {"rewards": rewards}, rewards
                if firsts:
                    greedy = [columns["baseline_responses"][first] for first in firsts]
                    baselines = self._baselines(result.total[len(samples) :], greedy, report.metrics)
                    results["baseline_rewards"] = baselines
                    # without a baseline, none of a group's samples can be trained on
                    compared = [r if math.isfinite(b) else math.nan for r, b in zip(rewards, baselines, strict=True)]
                rejected = self._rejected(claim.rows, result.values, compared, report.metrics)
                self.dock.ack(claim, results, rejected=rejected)
            report.metrics.merge(result.metrics(len(samples)))
            self._log_failures(iteration, [*claim.rows, *(claim.rows[first] for first in firsts)], result)
            if self.config.rl_config.overlong_buffer_enable:
                report.metrics.mean("reward/overlong_penalty", penalties)
            self._add_metrics(report, columns, samples, rewards)
        return report

    def evaluate(
        self, prompts: Sequence[PromptSample], responses: Sequence[Sequence[Sequence[int]]]
    ) -> list[tuple[Evaluated, str]]:
        """Scores and texts of responses that are no part of training, each prompt's one after the other."""
        tokens = [list(ids) for of_prompt in responses for ids in of_prompt]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        numbers = [number for number, of_prompt in enumerate(responses) for _ in of_prompt]
        with self.scoring:
            found = evaluate_texts(self.manager, [prompts[number] for number in numbers], texts, numbers)
        return [(replace(each, length=len(ids)), text) for each, ids, text in zip(found, tokens, texts, strict=True)]

    def _with_baseline(self, claim: Claim) -> range:
        """Where in a claim the rows are that carry a greedy response: the first of each group, if there are any."""
        if not uses_greedy_baseline(self.config):
            return range(0)
        return range(0, len(claim), self.config.rl_config.n_samples_per_prompt)

    def _samples(self, columns: Mapping[str, Any], places: Sequence[int], kind: str = "") -> list[RewardSample]:
        """What verifiers see of the responses at these places of a claim; kind `baseline_`: of the greedy ones."""
        if f"{kind}texts" in columns:
            texts = [columns[f"{kind}texts"][place] for place in places]
        else:
            tokens = [columns[f"{kind}responses"][place] for place in places]
            if "response_mask" in columns:  # what tools answered is not the model's
                masks = [columns["response_mask"][place] for place in places]
                tokens = [ids[mask > 0] for ids, mask in zip(tokens, masks, strict=True)]
            tokens = [ids.tolist() for ids in tokens]
            texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True) if tokens else []
        return reward_samples([columns["sample"][place] for place in places], texts)

    def _baselines(self, scores: Sequence[float], responses: Sequence[Any], metrics: MetricSet) -> list[float]:
        """Rewards of greedy responses, given their scores, for every row of their groups; NaN: scoring failed."""
        rewards = [
            score - self._overlong_penalty(len(response)) for score, response in zip(scores, responses, strict=True)
        ]
        scored = [float(math.isfinite(reward)) for reward in rewards]
        metrics.mean("reward/baseline_mean", rewards, weights=scored)
        metrics.sum("reward_failed_baselines", len(scored) - sum(scored), unit="prompts")
        return [reward for reward in rewards for _ in range(self.config.rl_config.n_samples_per_prompt)]

    def _log_failures(self, iteration: int, rows: Sequence[int], result: RewardResult) -> None:
        """One of each verifier's failures, which shows what is wrong; all are counted. rows: of what was scored."""
        for name, messages in result.messages.items():
            if messages:
                index, message = next(iter(messages.items()))
                logger.warning(
                    "iteration %d: %s failed on %d samples, such as row %d: %s",
                    iteration,
                    name,
                    len(messages),
                    rows[index],
                    message,
                )

    def _rejected(
        self, rows: Sequence[int], values: Mapping[str, list[float]], rewards: list[float], metrics: MetricSet
    ) -> list[int] | None:
        """Rows of groups that are not worth training on (dynamic sampling); None: groups are not filtered."""
        rl = self.config.rl_config
        if not rl.filter_groups_enable:
            return None
        metric, size = {**values, "reward": rewards}[rl.filter_groups_metric], rl.n_samples_per_prompt
        groups = [slice(first, first + size) for first in range(0, len(rows), size)]
        rejected = [group for group in groups if not differs_within(metric[group], rewards[group])]
        metrics.mean("reward/filtered_groups", [float(group in rejected) for group in groups])
        return [row for group in rejected for row in rows[group]]

    def _overlong_penalty(self, length: int) -> float:
        """Soft punishment of responses nearly as long as may be (DAPO, arXiv:2503.14476, section 3.4)."""
        rl, longest = self.config.rl_config, self.config.longest_response
        if not rl.overlong_buffer_enable:
            return 0.0
        assert rl.overlong_buffer is not None, "the configuration was checked"
        excess = length - (longest - rl.overlong_buffer)
        return max(0.0, excess / rl.overlong_buffer * rl.overlong_buffer_penalty_factor)

    def _add_metrics(
        self, report: RewardReport, columns: dict[str, list[Any]], samples: list[RewardSample], rewards: list[float]
    ) -> None:
        metrics, limit = report.metrics, self.config.longest_response
        scored = [reward for reward in rewards if math.isfinite(reward)]
        for name in ("mean", "max", "min", "std"):
            getattr(metrics, name)(f"reward/{name}", scored)
        for source in {sample.data_source for sample in columns["sample"]}:
            of_source = [
                reward
                for sample, reward in zip(columns["sample"], rewards, strict=True)
                if sample.data_source == source and math.isfinite(reward)
            ]
            metrics.mean(f"reward/source/{source}", of_source)
        lengths = {
            "response_length": [len(response) for response in columns["responses"]],
            "prompt_length": [len(sample.prompt_ids) for sample in columns["sample"]],
        }
        for name, values in lengths.items():
            metrics.mean(f"{name}/mean", values)
            metrics.max(f"{name}/max", values)
            metrics.min(f"{name}/min", values)
            metrics.sum(f"{name}/total", values)
        metrics.mean("response_length/clip_fraction", [float(n >= limit) for n in lengths["response_length"]])
        _add_tool_metrics(metrics, columns.get("tool_use", ()))
        for sample, reward in list(zip(samples, rewards, strict=True))[: self.SHOWN_SAMPLES - len(report.samples)]:
            report.samples.append(
                {"prompt": sample.prompt, "response": sample.response, "label": sample.label, "reward": reward}
            )

    def compute_advantages(self, iteration: int, kl_coef: float) -> RewardReport:
        """Advantages and loss mask of every group, as soon as all its rewards are there.

        kl_coef: what the KL to the reference weighs, with `use_kl_in_reward`.
        """
        timings, metrics, rl = Timings(iteration), MetricSet(), self.config.rl_config
        report = RewardReport(timings.spans, metrics)
        for claims in self._advantage_claims(timings):
            with timings("adv"):
                parts = [self.dock.get(claim, self.dock.spec.consumers["advantage"].needs) for claim in claims]
                columns = {name: [value for part in parts for value in part[name]] for name in parts[0]}
                rewards = torch.tensor([float(reward) for reward in columns["rewards"]])
                lengths = torch.tensor([len(response) for response in columns["responses"]])
                groups = torch.tensor([row for claim in claims for row in claim.rows]) // rl.n_samples_per_prompt
                # samples whose scoring failed, or that of their greedy response, do not train
                trained, baselines = torch.isfinite(rewards), None
                if "baseline_rewards" in columns:
                    baselines = torch.tensor([float(reward) for reward in columns["baseline_rewards"]])
                    trained &= torch.isfinite(baselines)
                mask = torch.repeat_interleave(trained.float(), lengths)
                if "response_mask" in columns:
                    mask *= torch.cat(columns["response_mask"])
                penalties = self._kl_penalties(columns, kl_coef) if rl.use_kl_in_reward else None
                values = torch.cat(columns["values"]) if "values" in columns else None
                advantages, returns = compute_advantages(
                    rl.adv_estimator, rewards, groups, mask, lengths, rl, penalties, values, baselines
                )
                results = {"advantages": advantages, "loss_mask": mask}
                self._put_tokens(claims, lengths, results if returns is None else {**results, "returns": returns})
            report.sequence_lengths += map(sum, zip(lengths.tolist(), map(len, columns["prompt_ids"]), strict=True))
            for group in groups.unique():
                scored = rewards[(groups == group) & torch.isfinite(rewards)]
                metrics.mean(
                    "reward/zero_variance_groups", float(len(scored) == 0 or bool((scored == scored[0]).all()))
                )
        return report

    def _advantage_claims(self, timings: Timings) -> Iterator[list[Claim]]:
        """Claims whose advantages are computed together: all of the iteration, or each on its own."""
        whole = needs_whole_batch(self.config.rl_config.adv_estimator)
        rows, claims = self.layout.sequences_per_iteration, list[Claim]()
        while (claim := self._claim("advantage", timings)) is not None:
            claims.append(claim)
            # to ask for more than there is would wait for what is claimed here to be acknowledged
            if not whole or sum(len(claim.rows) for claim in claims) == rows:
                yield claims
                claims = []

    def _put_tokens(
        self, claims: Sequence[Claim], lengths: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> None:
        """Hand in columns of all tokens [R] of these claims' rows, whose lengths are [B]."""
        of_claims = lengths.split([len(claim.rows) for claim in claims])
        parts = {name: column.split([int(part.sum()) for part in of_claims]) for name, column in columns.items()}
        for number, (claim, of_rows) in enumerate(zip(claims, of_claims, strict=True)):
            self.dock.ack(claim, {name: Jagged(part[number], of_rows) for name, part in parts.items()})

    def _kl_penalties(self, columns: Mapping[str, Any], kl_coef: float) -> torch.Tensor:
        """What every token's reward is reduced by, [R] float32."""
        estimate = KL_ESTIMATORS[self.config.rl_config.kl_penalty]
        names = (old_log_probs_column(self.config), "reference_log_probs")
        return kl_coef * estimate(*(torch.cat(columns[name]) for name in names))

    @staticmethod
    def concurrent_calls(config: Config) -> int:
        """Both stages of every iteration that may be under way, and `close`, which must not wait for them."""
        return 2 * (config.rl_config.staleness + 1) + 1

    def close(self) -> None:
        """End the verifiers' processes."""
        self.manager.close()


def _add_tool_metrics(metrics: MetricSet, uses: Sequence[ToolUse]) -> None:
    if not uses:
        return
    for name in ("calls", "failed", "timed_out", "tokens"):
        metrics.mean(f"tools/{name}", [getattr(use, name) for use in uses])
    metrics.mean("tools/turns", [use.turns for use in uses])
    metrics.max("tools/turns_max", [use.turns for use in uses])
