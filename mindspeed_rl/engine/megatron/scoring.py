"""What all engines in Megatron-core have: a model on this rank's shard, its weights, and passes over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.tensors import StoredTensors
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.base import Partition, TokenOutputs
from mindspeed_rl.engine.megatron.context_parallel import gather_tokens
from mindspeed_rl.engine.megatron.language_model import LanguageModel
from mindspeed_rl.engine.megatron.model import named_parameters
from mindspeed_rl.engine.megatron.packing import PackedMicroBatch, Part, pack
from mindspeed_rl.engine.megatron.ring_attention import open_ring
from mindspeed_rl.engine.megatron.sharding import Sharding, read_pieces
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import check_hf_names
from mindspeed_rl.types import RolloutBatch


class ScoringEngine:
    """A model's place on this rank; whoever is below it builds the chunks.

    Args:
        cfg: layout and precision.
        model: shape of what is built.
        device: this process's device.
    """

    def __init__(self, cfg: MegatronConfig, model: ModelConfig, device: Device):
        self.cfg, self.device, self.model_config = cfg, device, model
        self.data_parallel_rank = mpu.get_data_parallel_rank()
        self.data_parallel_size = mpu.get_data_parallel_world_size()
        last_stage = mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1
        first_of_stage = mpu.get_tensor_model_parallel_rank() == mpu.get_context_parallel_rank() == 0
        self.is_output_rank = last_stage and first_of_stage
        if cfg.uses_ring_attention:
            open_ring(mpu.get_context_parallel_group(), device.current())
        self.layout = WeightLayout.configured(cfg, model, self.data_parallel_size * cfg.context_parallel_size)
        if len(self.layout.stages[0]) > 1:  # Megatron's schedules look it up; its process groups do not depend on it
            mpu.set_virtual_pipeline_model_parallel_world_size(len(self.layout.stages[0]))

    def _parameters_of(self, chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
        return dict(named_parameters(chunks, self.model_config, self.layout))

    def _fill(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        weights: HFWeights | StoredTensors,
        stored: ModelConfig,
    ) -> None:
        """Read parameters from the weights of a model `stored`, which has them all."""
        if isinstance(weights, StoredTensors):
            read_pieces(Sharding(self.model_config, self.layout, parameters), weights)
            return
        check_hf_names(stored, weights.names)
        tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        pp_rank, ep_rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
        held = self.layout.held(self.model_config, pp_rank, ep_rank)
        with torch.no_grad():
            for name, tensor in parameters.items():
                tensor.copy_(held[name].load_shard(weights, tp_rank, tp_size))

    def _pack(self, batch: RolloutBatch, micro_batches: Partition) -> list[PackedMicroBatch]:
        """One for each pass of the pipeline."""
        assert sorted(chain(*micro_batches)) == list(range(len(batch))), "micro-batches hold every sequence once"
        multiple = self.cfg.tensor_model_parallel_size if self.cfg.sequence_parallel else 1
        part = Part(mpu.get_context_parallel_rank(), self.cfg.context_parallel_size, multiple)
        packed = [pack(batch.select(indices), self.device.current(), part) for indices in micro_batches]
        if (
            len(self.layout.stages[0]) > 1
        ):  # the interleaved schedule takes groups of as many passes as there are stages
            packed += [pack(batch.select([]), self.device.current(), part)] * (-len(packed) % self.layout.pp)
        return packed

    def _run(
        self,
        chunks: Sequence[torch.nn.Module],
        packed: Sequence[PackedMicroBatch],
        on_hidden: Any,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's schedule over the micro-batches; what `on_hidden` gives for each, on the last stage.

        It gets the micro-batch, the last chunk, and its final hidden states of what predicts response tokens, [r, h].
        """

        def finish(micro: PackedMicroBatch, module: Any, hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
            model = module.module if isinstance(module, DistributedDataParallel) else module
            return on_hidden(micro, model, hidden[micro.predictors])

        def forward(iterator: Iterator[PackedMicroBatch], module: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)
            output = module(micro.tokens, micro.positions, None, packed_seq_params=micro.params)
            return output, partial(finish, micro, module)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(packed) for _ in chunks] if len(chunks) > 1 else iter(packed),
            model=list(chunks),
            num_microbatches=len(packed),
            seq_length=max((micro.tokens.shape[1] for micro in packed), default=0),
            micro_batch_size=1,  # a packed micro-batch is one row of T tokens
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _of_all_tokens(self, micro: PackedMicroBatch, values: torch.Tensor) -> torch.Tensor:
        """From values of this context-parallel rank's response tokens to those of all, [r] -> [R]."""
        if self.cfg.context_parallel_size == 1:
            return values
        return gather_tokens(micro.predicted, len(micro.targets), mpu.get_context_parallel_group(), values)

    @torch.no_grad()
    def _outputs_of(
        self,
        chunks: Sequence[torch.nn.Module],
        batch: RolloutBatch,
        micro_batches: Partition,
        outputs: Callable[[PackedMicroBatch, LanguageModel, torch.Tensor], TokenOutputs],
    ) -> TokenOutputs | None:
        """Of the response tokens, [R] on the host in the order of `batch`; None off the output rank.

        `outputs` makes them of a micro-batch, the last chunk and final hidden states, as in `_run`.
        """

        def of_micro(micro: PackedMicroBatch, model: LanguageModel, hidden: torch.Tensor) -> TokenOutputs | None:
            return outputs(micro, model, hidden) if len(micro.batch) else None

        results = self._run(chunks, self._pack(batch, micro_batches), of_micro, forward_only=True)
        if not self.is_output_rank:
            return None
        return _in_order(results[: len(micro_batches)], micro_batches, batch.response_lengths.tolist())


def _in_order(found: Sequence[TokenOutputs], micro_batches: Partition, lengths: Sequence[int]) -> TokenOutputs:
    """Outputs of micro-batches as those of the batch that they divide, on the host; `lengths`: of its responses."""
    indices = list(chain(*micro_batches))
    places = sorted(range(len(indices)), key=indices.__getitem__)

    def whole(name: str) -> torch.Tensor | None:
        parts = [getattr(outputs, name) for outputs in found]
        if parts[0] is None:
            return None
        of_sequences = torch.cat(parts).cpu().split([lengths[index] for index in indices])
        return torch.cat([of_sequences[place] for place in places])

    return TokenOutputs(**{field.name: whole(field.name) for field in fields(TokenOutputs)})
