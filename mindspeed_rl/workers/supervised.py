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
        passes = self._passes(batch)
        if self.objective.uses_reference:
            with timings("reference_model"):
                self._add_reference(batch, passes)
        with timings("update"):
            return self._train(batch, passes)

    def validate(self, rows: Sequence[SupervisedRow], shares: Shares, timings: Timings) -> MetricSet:
        """The objective's metrics of `rows`."""
        batch = self._batch(rows, shares)
        with timings("validation"):
            passes = self._passes(batch)
            if self.objective.uses_reference:
                self._add_reference(batch, passes)
            outputs = self.engine.score(batch, passes, TEMPERATURE)
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

    def _passes(self, batch: RolloutBatch) -> list[list[int]]:
        """The sequences of each pass over `batch`, whole rows.

        All data-parallel ranks make as many as the one that needs most, as their collectives must meet.
        """
        each, cap = self.objective.responses, self.config.rl_config.max_packing_token_size
        rows, lengths = len(batch) // each, batch.lengths
        if cap is None:  # ranks have equally many rows
            passes = fixed_micro_batches(rows, self.config.actor.micro_batch_size // each)
        else:
            of_rows = [sum(lengths[row * each : (row + 1) * each]) for row in range(rows)]
            needed = len(micro_batches(of_rows, cap))
            passes = micro_batches(of_rows, cap, int(self.engine.max_over_data_parallel([needed])[0]))
        return [[row * each + response for row in members for response in range(each)] for members in passes]

    def _add_reference(self, batch: RolloutBatch, passes: list[list[int]]) -> None:
        outputs = self.engine.score(batch, passes, TEMPERATURE, reference=True)
        found = self.replica.share(lambda: None if outputs is None else outputs.log_probs)
        assert found is not None, "the leader of a model replica is its output rank"
        batch.columns[REFERENCE] = list(found.split(batch.response_lengths.tolist()))

    def _train(self, batch: RolloutBatch, passes: list[list[int]]) -> MetricSet:
        local, cost = self.objective.denominators(batch), sum(sequence_costs(batch.lengths, self.model))
        sums = self.engine.sum_over_data_parallel([local.tokens, local.sequences, cost])
        largest_cost = self.engine.max_over_data_parallel([cost])[0]
        denominators = Denominators(sums[0], sums[1])

        def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
            assert outputs.log_probs is not None, "a language model has log-probs"
            return self.objective(micro, outputs.log_probs, denominators)

        metrics = self.engine.train_mini_batch(batch, loss, passes, TEMPERATURE, entropy=False)
        metrics.mean("update/imbalance", largest_cost * self.layout.dp / sums[2])
        return metrics
