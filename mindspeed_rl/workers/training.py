"""The training role of a rank: log-probs of actor and reference, optimizer steps, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl.algorithms.aggregation import count
from mindspeed_rl.algorithms.covariance import Collectives, select_tokens, token_noise
from mindspeed_rl.algorithms.importance import importance_weights
from mindspeed_rl.algorithms.mismatch import mismatch_metrics
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.algorithms.registry import load_custom_algorithms
from mindspeed_rl.algorithms.value_objective import ValueObjective
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.common.timing import Timings
from mindspeed_rl.config.algorithm import COV_LOSSES
from mindspeed_rl.config.layout import (
    has_critic_model,
    has_reference_model,
    shares_critic,
    uses_full_kl,
    uses_reward_model,
)
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.data.packing import fixed_micro_batches, micro_batches, sequence_costs
from mindspeed_rl.resharding.layout import RolloutLayout
from mindspeed_rl.transfer_dock.jagged import Jagged
from mindspeed_rl.transfer_dock.spec import Claim
from mindspeed_rl.types import Denominators, RolloutBatch
from mindspeed_rl.workers.checkpoints import Checkpoints
from mindspeed_rl.workers.context import Context, Source
from mindspeed_rl.workers.control import ControlGroup
from mindspeed_rl.workers.reward_model import RewardModel
from mindspeed_rl.workers.stages import old_log_probs_column, scoring_stages

if TYPE_CHECKING:
    from mindspeed_rl.engine.base import TokenOutputs, TrainingEngine


class Training:
    """Actor and reference: works on its model replica's share of every training stage.

    Args:
        context: this rank's place in the run.
        model: shape of the model.
        source: weights and state that the run starts from.
    """

    def __init__(self, context: Context, model: ModelConfig, source: Source):
        from mindspeed_rl.engine.megatron.critic import ActorCriticEngine, CriticEngine
        from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

        self.rank, self.config, self.layout, self.model = context.rank, context.config, context.layout, model
        self.dock, self.timeout = context.dock, context.stage_seconds
        self.scoring = scoring_stages(self.config)
        self.rl, self.sampling = self.config.rl_config, self.config.generate_config.sampling_config
        # the last pipeline stage's first rank holds the log-probs, so it speaks for its model replica
        self.replica = ControlGroup(
            self.layout.model_replicas(),
            self.rank,
            context.collective_minutes,
            leader=lambda members: members[-self.layout.tp * self.layout.cp],
        )
        self.checkpoints = Checkpoints(context)
        initialize_parallel_state(self.config.actor)
        steps, iterations = self.layout.total_optimizer_steps, self.config.actor.train_iters
        kind = ActorCriticEngine if shares_critic(self.config) else MegatronEngine
        self.engine: TrainingEngine = kind(
            self.config.actor,
            model,
            context.device,
            # none while the critic warms up
            steps * (iterations - self.rl.critic_warmup) // iterations,
            self.checkpoints.weights(source.weights),
            with_reference=has_reference_model(self.config),
        )
        load_custom_algorithms(self.rl.custom_algorithm_file)
        self.critic: TrainingEngine | None = None
        if has_critic_model(self.config):
            self.critic = CriticEngine(
                self.config.critic,
                model,
                context.device,
                steps,
                self.checkpoints.weights(source.critic_weights or source.weights),
            )
        self.reward_model = RewardModel(context, source) if uses_reward_model(self.config) else None
        self.objective = PolicyObjective(self.rl, horizon=self.config.longest_response)
        self.value_objective = ValueObjective(self.rl, horizon=self.config.longest_response)
        self.checkpoints.restore(source, self.engine, self.critic)

    def export_weights(self, rollout: RolloutLayout | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor's weights under their Hugging Face names, all or what `rollout` takes here (a collective)."""
        self.engine.onload("param")
        bucket_bytes = int(self.config.generate_config.resharding_bucket_mb * 2**20)
        return self.engine.export_weights(bucket_bytes, rollout)

    # ---- memory --------------------------------------------------------------------------------------------------

    def onload(self, part: str) -> None:
        """Bring a part of an engine to the device; those that begin with `critic_` are the critic's."""
        self._move("onload", part)

    def offload(self, part: str) -> None:
        """Take such a part off the device."""
        self._move("offload", part)

    def _move(self, action: str, part: str) -> None:
        if part == REWARD_MODEL:
            if self.reward_model is not None:
                getattr(self.reward_model.engine, action)()
            return
        engine = self.critic if part.startswith("critic_") else self.engine
        if engine is not None:
            getattr(engine, action)(part.removeprefix("critic_"))

    # ---- scoring -------------------------------------------------------------------------------------------------

    def score(self, stage: str, timings: Timings) -> None:
        """Put this replica's share of `stage`, one of `scoring_stages`, into the dock."""
        for claim in self._claims(stage, timings):
            with timings(self.scoring[stage].timing):
                self._put_scores(claim)

    def score_what_is_ready(self, iteration: int, stage: str) -> None:
        """At most one micro-batch, so that whoever shares the device is not held up for long."""
        share = self.engine.data_parallel_rank
        count = min(self._micro_batch_size(stage), self.layout.sequences_per_mini_batch_per_rank)
        claim = self.replica.share(lambda: self.dock.try_claim(stage, iteration, count, share))
        if isinstance(claim, Claim):  # else: nothing is ready yet, or nothing is left
            self._put_scores(claim)

    def _micro_batches(self, lengths: Sequence[int], stage: str, at_least: int = 1) -> list[list[int]]:
        """The sequences of each pass: so many, or with `use_dynamic_bsz` as many as the cap holds."""
        cap = self.rl.max_packing_token_size
        if cap is None:
            return fixed_micro_batches(len(lengths), self._micro_batch_size(stage))
        return micro_batches(lengths, cap, at_least)

    def _scoring_passes(self, lengths: Sequence[int], stage: str) -> list[list[int]]:
        """The same for ranks that share experts, which make equally many passes: each needs the others in its own."""
        passes = self._micro_batches(lengths, stage)
        if self.layout.ep > 1 and self.rl.use_dynamic_bsz:
            most = self.engine.max_over_data_parallel([len(passes)])[0]
            passes = self._micro_batches(lengths, stage, at_least=int(most))
        return passes

    def _micro_batch_size(self, stage: str) -> int:
        """Sequences of one pass; with `use_dynamic_bsz`, how many fit into one whatever their lengths."""
        if self.rl.max_packing_token_size is not None:
            return self.rl.max_packing_token_size // self.config.longest_sequence
        sizes = {
            "update": self.config.actor.micro_batch_size,
            "reference": self.rl.ref_forward_micro_batch_size,
            "old_log_prob": self.rl.actor_forward_micro_batch_size,
            "value": self.rl.critic_forward_micro_batch_size,
            "critic_update": self.config.critic.micro_batch_size,
            REWARD_MODEL: self.config.reward_config.micro_batch_size,
        }
        return sizes[stage]

    def _put_scores(self, claim: Claim) -> None:
        columns = self._rewards(claim) if claim.consumer == REWARD_MODEL else self._token_outputs(claim)
        if self.replica.is_leader:
            assert columns is not None, "the leader of a model replica is its output rank"
            self.dock.ack(claim, columns)

    def _token_outputs(self, claim: Claim) -> dict[str, Any] | None:
        stage, batch = claim.consumer, self._fetch(claim)
        engine = self.critic if stage == "value" else self.engine
        assert engine is not None, "a run without a critic's model has no such stage"
        passes = self._scoring_passes(batch.lengths, stage)
        outputs = engine.score(batch, passes, self.sampling.temperature, reference=stage == "reference")
        if outputs is None:
            return None
        found = {column: getattr(outputs, name) for column, name in self.scoring[stage].columns.items()}
        return {column: Jagged(values, batch.response_lengths) for column, values in found.items()}

    def _rewards(self, claim: Claim) -> dict[str, Any] | None:
        assert self.reward_model is not None, "a run without a reward model has no such stage"
        columns = self.dock.get(claim, self.dock.spec.consumers[claim.consumer].needs)
        scores = self.reward_model.scores(columns, partial(self._scoring_passes, stage=REWARD_MODEL))
        return None if scores is None else {"reward_model_scores": scores}

    # ---- samples -------------------------------------------------------------------------------------------------

    def _claims(self, consumer: str, timings: Timings) -> Iterator[Claim]:
        """This model replica's share of `consumer`, one mini-batch after the other."""
        while (claim := self._claim(consumer, timings)) is not None:
            yield claim

    def _claim(self, consumer: str, timings: Timings) -> Claim | None:
        count, share = self.layout.sequences_per_mini_batch_per_rank, self.engine.data_parallel_rank
        with timings.waiting(consumer):
            return self.replica.share(
                lambda: self.dock.claim(consumer, timings.iteration, count, share, self.timeout)
            )

    def _fetch(self, claim: Claim) -> RolloutBatch:
        needs = self.dock.spec.consumers[claim.consumer].needs
        columns = {name: list(values) for name, values in self.dock.get(claim, needs).items()}
        return RolloutBatch(columns.pop("prompt_ids"), columns.pop("responses"), columns)

    # ---- update --------------------------------------------------------------------------------------------------

    def update(self, kl_coef: float, timings: Timings) -> MetricSet:
        """Train on the iteration's samples: `epochs` passes, one optimizer step a mini-batch, of a critic before."""
        metrics, mini_batches = MetricSet(), []
        for claim in self._claims("update", timings):
            with timings("update"):
                batch = self._fetch(claim)
                if self.rl.loss_type in COV_LOSSES:
                    batch.columns["selected"] = self._selected(batch, claim.rows, timings.iteration)
                if self.rl.epochs > 1:
                    mini_batches.append(batch)
                self._train(batch, kl_coef, timings.iteration, metrics)
                if self.replica.is_leader:
                    self.dock.ack(claim)
        for batch in mini_batches * (self.rl.epochs - 1):
            with timings("update"):
                self._train(batch, kl_coef, timings.iteration, metrics)
        return metrics

    def _train(self, batch: RolloutBatch, kl_coef: float, iteration: int, metrics: MetricSet) -> None:
        """An update, whose metrics are added to those of the iteration's earlier ones."""
        local = count(torch.cat(batch.columns["loss_mask"]), batch.response_lengths)
        cost = sum(sequence_costs(batch.lengths, self.model))
        needed = len(self._micro_batches(batch.lengths, "update"))
        tokens, sequences, whole_cost = self.engine.sum_over_data_parallel([local.tokens, local.sequences, cost])
        largest_cost, most = self.engine.max_over_data_parallel([cost, needed])
        metrics.mean("update/imbalance", largest_cost * self.layout.dp / whole_cost)
        denominators = Denominators(tokens, sequences)
        # claims give all data-parallel ranks equally many sequences: each can make as many passes as any other
        if self.critic is not None:
            passes = self._micro_batches(batch.lengths, "critic_update", at_least=int(most))
            metrics.merge(self._train_critic(self.critic, batch, passes, denominators))
        if iteration >= self.rl.critic_warmup:
            passes = self._micro_batches(batch.lengths, "update", at_least=int(most))
            self._train_actor(batch, passes, denominators, kl_coef, iteration, metrics)

    def _train_critic(
        self, critic: TrainingEngine, batch: RolloutBatch, passes: list[list[int]], denominators: Denominators
    ) -> MetricSet:
        def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
            assert outputs.values is not None, "a critic has values"
            return self._value_loss(micro, outputs.values, denominators)

        return critic.train_mini_batch(batch, loss, passes, self.sampling.temperature, entropy=False)

    def _value_loss(
        self, micro: RolloutBatch, values: torch.Tensor, denominators: Denominators
    ) -> tuple[torch.Tensor, MetricSet]:
        names = ("values", "returns", "loss_mask")
        old, returns, mask = (torch.cat(micro.columns[name]).to(values.device) for name in names)
        lengths = micro.response_lengths.to(values.device)
        return self.value_objective(values, old, returns, mask, lengths, denominators)

    def _train_actor(
        self,
        batch: RolloutBatch,
        passes: list[list[int]],
        denominators: Denominators,
        kl_coef: float,
        iteration: int,
        metrics: MetricSet,
    ) -> None:
        """None after an update of the iteration that was not made."""
        if (stopped := metrics.get("actor/early_stopped")) and stopped.value:
            metrics.mean("actor/early_stopped", 1.0)
            return

        def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
            log_probs = outputs.log_probs
            assert log_probs is not None, "an actor has log-probs"
            columns = {name: torch.cat(values).to(log_probs.device) for name, values in micro.columns.items()}
            lengths = micro.response_lengths.to(log_probs.device)
            old = columns.get(old_log_probs_column(self.config), log_probs.detach())
            before = old if self.rl.recompute_logprobs else log_probs.detach()
            importance, of_weights = self._importance(columns, before, lengths, iteration)
            value, found = self.objective(
                log_probs=log_probs,
                entropy=outputs.entropy,
                old_log_probs=old,
                ref_log_probs=columns.get("reference_log_probs"),
                advantages=columns["advantages"],
                mask=columns["loss_mask"],
                response_lengths=lengths,
                denominators=denominators,
                kl_coef=0.0 if self.rl.use_kl_in_reward else kl_coef,
                importance=importance,
                selected=columns.get("selected"),
                full_kl=outputs.kl,
            )
            found.merge(of_weights)
            if outputs.values is not None:
                of_values, of_critic = self._value_loss(micro, outputs.values, denominators)
                value = value + self.rl.value_loss_coef * of_values
                found.merge(of_critic)
            if "policy_versions" in columns:
                age = iteration - columns["policy_versions"]
                found.mean("staleness/mean", age, unit="iterations")
                found.max("staleness/max", age, unit="iterations")
            if "rollout_log_probs" in columns:
                found.merge(mismatch_metrics(before, columns["rollout_log_probs"], columns["loss_mask"]))
            return value, found

        ratio = self.rl.early_stop_imp_ratio
        metrics.merge(
            self.engine.train_mini_batch(
                batch,
                loss,
                passes,
                self.sampling.temperature,
                entropy=True,
                kl=uses_full_kl(self.config),
                limit=None if ratio is None else ("actor/imp_ratio", ratio),
            )
        )

    def _importance(
        self, columns: Mapping[str, torch.Tensor], before: torch.Tensor, lengths: torch.Tensor, iteration: int
    ) -> tuple[torch.Tensor | None, MetricSet]:
        """Weights [R] of the tokens' policy losses, None: all 1; and metrics of them."""
        corrected = None
        if self.rl.rollout_is == "stale" and "policy_versions" in columns:
            corrected = columns["policy_versions"] < iteration
        elif self.rl.rollout_is != "all":
            return None, MetricSet()
        if not self.rl.recompute_logprobs and self.rl.rollout_is_mode != "mask":
            return None, MetricSet()  # the policy ratio is the weight
        rollout, mask = columns["rollout_log_probs"], columns["loss_mask"]
        return importance_weights(self.rl, before, rollout, mask, lengths, corrected)

    def _selected(self, batch: RolloutBatch, rows: Sequence[int], iteration: int) -> list[torch.Tensor]:
        """The tokens that Clip-Cov or KL-Cov treats apart, B x [response length] bool."""
        noise = [
            token_noise(self.config.actor.seed, iteration, row, len(response))
            for row, response in zip(rows, batch.responses, strict=True)
        ]
        names = (old_log_probs_column(self.config), "advantages", "loss_mask")
        old, advantages, mask = (torch.cat(batch.columns[name]) for name in names)
        collectives = Collectives(self.engine.sum_over_data_parallel, self.engine.gather_over_data_parallel)
        chosen = select_tokens(self.rl, old, advantages, mask, torch.cat(noise), collectives)
        return list(chosen.split(batch.response_lengths.tolist()))

    def save(self, root: str, iteration: int) -> None:
        """Write this rank's part of a checkpoint that the driver has begun and will commit."""
        for part in ("param", "optimizer", "critic_param", "critic_optimizer"):
            self.onload(part)
        self.checkpoints.save(root, iteration, self.engine, self.critic)
