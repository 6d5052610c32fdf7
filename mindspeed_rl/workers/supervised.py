"""The role of a rank that learns from given responses: optimizer steps, validation, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mindspeed_rl.algorithms.supervised import LOSS_MASK, REFERENCE, make_objective
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.common.timing import Timings
from mindspeed_rl.config.layout import has_reference_model
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.data.packing import fixed_micro_batches, micro_batches, sequence_costs
from mindspeed_rl.data.supervised import SupervisedRow
from mindspeed_rl.types import Denominators, RolloutBatch
from mindspeed_rl.workers.checkpoints import Checkpoints
from mindspeed_rl.workers.context import Context, Source
from mindspeed_rl.workers.control import ControlGroup

if TYPE_CHECKING:
    from mindspeed_rl.engine.base import TokenOutputs, TrainingEngine

TEMPERATURE = 1.0  # logits are taken as they are

Shares = Sequence[Sequence[int]]  # by data-parallel rank, its rows: equally many


class Supervised:
    """The model, and with DPO the reference.

    Args:
        context: this rank's place in the run.
        model: shape of the model.
        source: weights and state that the run starts from.
    """

    def __init__(self, context: Context, model: ModelConfig, source: Source):
        from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

        self.config, self.layout, self.model = context.config, context.layout, model
        # the last pipeline stage's first rank holds the log-probs, so it speaks for its model replica
        self.replica = ControlGroup(
            self.layout.model_replicas(),
            context.rank,
            context.collective_minutes,
            leader=lambda members: members[-self.layout.tp * self.layout.cp],
        )
        self.checkpoints = Checkpoints(context)
        initialize_parallel_state(self.config.actor)
        self.objective = make_objective(self.config)
        self.engine: TrainingEngine = MegatronEngine(
            self.config.actor,
            model,
            context.device,
            self.layout.total_optimizer_steps,
            self.checkpoints.weights(source.weights),
            with_reference=has_reference_model(self.config),
        )
        self.checkpoints.restore(source, self.engine)

    def update(self, rows: Sequence[SupervisedRow], shares: Shares, timings: Timings) -> MetricSet:
        """One optimizer step on `rows`."""
        batch = self._batch(rows, shares)
        if self.objective.uses_reference:
            with timings("reference_model"):
                self._add_reference(batch)
        with timings("update"):
            return self._train(batch)

    def validate(self, rows: Sequence[SupervisedRow], shares: Shares, timings: Timings) -> MetricSet:
        """The objective's metrics of `rows`."""
        batch = self._batch(rows, shares)
        with timings("validation"):
            if self.objective.uses_reference:
                self._add_reference(batch)
            outputs = self.engine.score(batch, self._passes(batch, self._most(batch)), TEMPERATURE)
            if outputs is None:
                return MetricSet()
            assert outputs.log_probs is not None, "a language model has log-probs"
            return self.objective(batch, outputs.log_probs, Denominators(1.0, 1.0))[1]

    # ---- one batch -----------------------------------------------------------------------------------------------

    def _batch(self, rows: Sequence[SupervisedRow], shares: Shares) -> RolloutBatch:
        """This data-parallel rank's rows, the responses of a row one after the other."""
        pairs = [
            (rows[index].prompt, response)
            for index in shares[self.engine.data_parallel_rank]
            for response in rows[index].responses
        ]
        return RolloutBatch(
            [torch.from_numpy(prompt).long() for prompt, _ in pairs],
            [torch.from_numpy(response.ids).long() for _, response in pairs],
            {LOSS_MASK: [torch.from_numpy(response.learned).float() for _, response in pairs]},
        )

    def _passes(self, batch: RolloutBatch, at_least: int = 1) -> list[list[int]]:
        """The sequences of each pass over `batch`, whole rows."""
        each, cap = self.objective.responses, self.config.rl_config.max_packing_token_size
        rows = len(batch) // each
        if cap is None:
            passes = fixed_micro_batches(rows, self.config.actor.micro_batch_size // each)
        else:
            lengths = batch.lengths
            passes = micro_batches(
                [sum(lengths[row * each : (row + 1) * each]) for row in range(rows)], cap, at_least
            )
        return [[row * each + response for row in rows_ for response in range(each)] for rows_ in passes]

    def _most(self, batch: RolloutBatch) -> int:
        """Passes of the data-parallel rank that needs most: all make as many, as their collectives must meet."""
        return int(self.engine.max_over_data_parallel([len(self._passes(batch))])[0])

    def _add_reference(self, batch: RolloutBatch) -> None:
        outputs = self.engine.score(batch, self._passes(batch, self._most(batch)), TEMPERATURE, reference=True)
        found = self.replica.share(lambda: None if outputs is None else outputs.log_probs)
        assert found is not None, "the leader of a model replica is its output rank"
        batch.columns[REFERENCE] = list(found.split(batch.response_lengths.tolist()))

    def _train(self, batch: RolloutBatch) -> MetricSet:
        local, cost = self.objective.denominators(batch), sum(sequence_costs(batch.lengths, self.model))
        sums = self.engine.sum_over_data_parallel([local.tokens, local.sequences, cost])
        largest_cost = self.engine.max_over_data_parallel([cost])[0]
        denominators = Denominators(sums[0], sums[1])

        def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
            assert outputs.log_probs is not None, "a language model has log-probs"
            return self.objective(micro, outputs.log_probs, denominators)

        passes = self._passes(batch, self._most(batch))
        metrics = self.engine.train_mini_batch(batch, loss, passes, TEMPERATURE, entropy=False)
        metrics.mean("update/imbalance", largest_cost * self.layout.dp / sums[2])
        return metrics
