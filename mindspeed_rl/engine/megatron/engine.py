"""Actor and reference in Megatron-core: log-probs, optimizer steps, weights in and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from mindspeed_rl.algorithms.full_kl import vocab_parallel_kl
from mindspeed_rl.algorithms.log_probs import vocab_parallel_log_probs
from mindspeed_rl.algorithms.vocabulary import OutputLayer
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.lora import ADAPTERS
from mindspeed_rl.checkpoint.tensors import Piece, StoredTensors
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.common.metric import Metric, MetricSet
from mindspeed_rl.config.lora import adapted
from mindspeed_rl.config.memory import LOGIT_CHUNK
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.base import LossFunction, Partition, TokenOutputs
from mindspeed_rl.engine.megatron.language_model import LanguageModel
from mindspeed_rl.engine.megatron.lora import MergedWeights, initialise_adapters, is_adapter, without_adapters
from mindspeed_rl.engine.megatron.model import build_model, data_parallel
from mindspeed_rl.engine.megatron.offload import HostMemory
from mindspeed_rl.engine.megatron.optimizer import Optimizer
from mindspeed_rl.engine.megatron.packing import PackedMicroBatch
from mindspeed_rl.engine.megatron.scoring import ScoringEngine
from mindspeed_rl.engine.megatron.sharding import Sharding, pieces_to_write, read_pieces
from mindspeed_rl.resharding.checksums import training_checksums
from mindspeed_rl.resharding.export import Groups, check_parameters, export_hf
from mindspeed_rl.resharding.layout import RolloutLayout
from mindspeed_rl.resharding.plan import ExportPlan, make_plan, planned_dtypes
from mindspeed_rl.types import RolloutBatch


def initialize_parallel_state(cfg: MegatronConfig) -> None:
    """Create Megatron's process groups over the existing torch.distributed world, and its RNG streams."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=cfg.tensor_model_parallel_size,
        pipeline_model_parallel_size=cfg.pipeline_model_parallel_size,
        context_parallel_size=cfg.context_parallel_size,
        expert_model_parallel_size=cfg.expert_model_parallel_size,
        distributed_timeout_minutes=max(1, round(cfg.distributed_timeout_minutes)),
    )
    model_parallel_cuda_manual_seed(cfg.seed)


class MegatronEngine(ScoringEngine):
    """See `mindspeed_rl.engine.base.TrainingEngine`. A class below it has another role, in metrics and checkpoints.

    Args:
        cfg: the actor's configuration.
        model: shape of the model.
        device: this process's device.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        weights: what actor and reference start from.
        with_reference: keep a frozen copy of the starting weights. With adapters (LoRA) none is needed for what asks
            for the reference: the actor without them is that.
    """

    role = "actor"
    state_prefix = ""

    def __init__(
        self,
        cfg: MegatronConfig,
        model: ModelConfig,
        device: Device,
        total_steps: int,
        weights: HFWeights | StoredTensors,
        with_reference: bool,
    ):
        super().__init__(cfg, adapted(self._trained(model), cfg), device)
        self.backbone = model
        self.actor = data_parallel(cfg, self._build(self.model_config, weights))
        self.optimizer = Optimizer(cfg, self.actor, total_steps)
        self._plans: dict[tuple[int, RolloutLayout | None], ExportPlan] = {}
        self.reference: list[LanguageModel] = []
        if with_reference:
            self.reference = [chunk.requires_grad_(False) for chunk in self._build(model, weights)]
        self._away = {
            "param": HostMemory(device),
            "base": HostMemory(device, "frozen"),  # what adapters do not change of "param", and goes with it
            "grad": HostMemory(device, "dropped"),
            "optimizer": HostMemory(device),
            "reference": HostMemory(device, "frozen"),
        }

    def _trained(self, model: ModelConfig) -> ModelConfig:
        """What is built on the layers of a language model."""
        return model

    @property
    def exported(self) -> ModelConfig:
        """What others take of the weights: rollout, and Hugging Face folders."""
        return self.backbone

    # ---- weights -------------------------------------------------------------------------------------------------

    def _build(self, model: ModelConfig, weights: HFWeights | StoredTensors) -> list[LanguageModel]:
        """This rank's chunks, with the weights that the run starts from, and adapters that change nothing yet."""
        chunks = build_model(self.cfg, model, self.device, self.layout)
        parameters = self._parameters_of(chunks)
        adapters = {name: parameters.pop(name) for name in list(parameters) if is_adapter(name)}
        self._load(parameters, weights)
        if adapters:
            tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
            held = self.layout.held(model, mpu.get_pipeline_model_parallel_rank())
            assert adapters.keys() == {name for name in held if is_adapter(name)}, "the layers are those of the table"
            initialise_adapters(adapters, held, self.cfg.seed, tp_rank, tp_size)
        return chunks

    def _load(self, parameters: dict[str, torch.nn.Parameter], weights: HFWeights | StoredTensors) -> None:
        """Fill what is not an adapter."""
        self._fill(parameters, weights, self.backbone)

    def export_weights(
        self, bucket_bytes: int, rollout: RolloutLayout | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor's weights under their Hugging Face names (a collective)."""
        plan = self._plan(bucket_bytes, rollout)
        groups = Groups(
            pipeline=_none_if_alone(mpu.get_pipeline_model_parallel_group()),
            tensor=_none_if_alone(mpu.get_tensor_model_parallel_group()),
            expert=_none_if_alone(mpu.get_expert_tensor_and_model_parallel_group()),
            replica=_none_if_alone(mpu.get_expert_tensor_model_pipeline_parallel_group()),
        )
        return export_hf(self._merged_parameters(), plan, groups, self.device)

    def weight_checksums(self) -> dict[str, int]:
        """Of all Hugging Face tensors, computed on the shards (a collective; see `resharding.checksums`)."""
        group = _none_if_alone(mpu.get_expert_tensor_model_pipeline_parallel_group())
        return training_checksums(self._merged_parameters(), self.exported, self.layout, dist.get_rank(), group)

    def _plan(self, bucket_bytes: int, rollout: RolloutLayout | None) -> ExportPlan:
        """Worked out once: names, shapes and dtypes stay."""
        if (bucket_bytes, rollout) not in self._plans:
            model, rank = self.exported, dist.get_rank()
            plan = make_plan(model, planned_dtypes(self.cfg, model), self.layout, rank, bucket_bytes, rollout)
            check_parameters(self._actor_parameters(), plan)
            self._plans[bucket_bytes, rollout] = plan
        return self._plans[bucket_bytes, rollout]

    def _actor_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The actor's parameters with their newest values, by name in the whole model."""
        if self.cfg.overlap_param_gather:
            for chunk in self.actor:
                chunk.start_param_sync(force_sync=True)
        return self._parameters_of([chunk.module for chunk in self.actor])

    def _merged_parameters(self) -> Mapping[str, torch.Tensor]:
        """Those of a model without adapters that does the same."""
        parameters = self._actor_parameters()
        return MergedWeights(parameters, self.cfg.lora_scale) if self.cfg.lora_r else parameters

    # ---- passes --------------------------------------------------------------------------------------------------

    def _response_outputs(
        self, micro: PackedMicroBatch, model: LanguageModel, hidden: torch.Tensor, temperature: float, entropy: bool
    ) -> TokenOutputs:
        """Of all response tokens, on every rank of the last stage."""
        of_all = partial(self._of_all_tokens, micro)
        values = None if model.value_head is None else of_all(model.values(hidden))
        if model.output_layer is None:
            return TokenOutputs(values=values)
        weight, targets = model.output_weight, micro.targets[micro.predicted]
        group = _none_if_alone(mpu.get_tensor_model_parallel_group())
        layer = OutputLayer(group, self.model_config.vocab_size, temperature, LOGIT_CHUNK)
        log_probs, entropies = vocab_parallel_log_probs(hidden, weight, targets, layer, entropy)
        kl = None
        if micro.reference is not None:
            of_reference = (self.reference[-1] if self.reference else model).output_weight
            kl = of_all(vocab_parallel_kl(hidden, weight, micro.reference, of_reference, layer))
        return TokenOutputs(of_all(log_probs), None if entropies is None else of_all(entropies), kl, values)

    @torch.no_grad()
    def _with_reference(self, packed: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
        """The micro-batches with the reference's hidden states, where these are: on the last stage."""
        with self._as_reference() as chunks:
            found = self._run(chunks, packed, lambda micro, model, hidden: hidden, forward_only=True)
        of_micro = found or [None] * len(packed)
        return [replace(micro, reference=hidden) for micro, hidden in zip(packed, of_micro, strict=True)]

    @contextmanager
    def _as_reference(self) -> Iterator[Sequence[torch.nn.Module]]:
        """The chunks of the model that the run started from."""
        assert self.reference or self.cfg.lora_r, "this run keeps no reference model"
        with without_adapters(self.actor):
            yield self.reference or self.actor

    @torch.no_grad()
    def score(
        self, batch: RolloutBatch, micro_batches: Partition, temperature: float, reference: bool = False
    ) -> TokenOutputs | None:
        """Log-probs, or a critic's values, of the response tokens, [R] on the host; None off the output rank.

        They are in the order of `batch`, whatever the micro-batches.
        """

        def outputs(micro: PackedMicroBatch, model: LanguageModel, hidden: torch.Tensor) -> TokenOutputs:
            return self._response_outputs(micro, model, hidden, temperature, entropy=False)

        with self._as_reference() if reference else nullcontext(self.actor) as chunks:
            return self._outputs_of(chunks, batch, micro_batches, outputs)

    def train_mini_batch(
        self,
        batch: RolloutBatch,
        loss_function: LossFunction,
        micro_batches: Partition,
        temperature: float,
        entropy: bool,
        kl: bool = False,
        limit: tuple[str, float] | None = None,
    ) -> MetricSet:
        """One optimizer step on this data-parallel rank's share of a mini-batch.

        entropy, kl: the loss function gets these, too (see `TokenOutputs`); kl needs the reference on the device.
        limit: a metric that is a mean over the mini-batch, and the largest value with which the step is taken;
        `actor/early_stopped` tells every rank whether it was not.

        Raises:
            RuntimeError: a gradient is not finite (raised by Megatron before the step is taken).
        """

        def loss_of(
            micro: PackedMicroBatch, model: LanguageModel, hidden: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, MetricSet]:
            # the token count, second, would only matter if Megatron were asked to divide by it
            tokens = torch.ones((), dtype=torch.int, device=hidden.device)
            if not len(micro.batch):
                return model.nothing(hidden), tokens, MetricSet()
            outputs = self._response_outputs(micro, model, hidden, temperature, entropy)
            loss, metrics = loss_function(micro.batch, outputs)
            return loss, tokens, metrics

        packed = self._pack(batch, micro_batches)
        if kl:
            packed = self._with_reference(packed)
        self.optimizer.zero_grad()
        results = self._run(self.actor, packed, loss_of, forward_only=False)
        finalize_model_grads(self.actor)
        metrics = MetricSet()
        if self.is_output_rank:
            for result in results:
                metrics.merge(result)
        if limit is not None:
            stopped = self._mean_over_all(metrics.get(limit[0])) > limit[1]
            metrics.mean("actor/early_stopped", float(stopped))
            if stopped:
                return metrics
        self._away["optimizer"].ready()
        grad_norm, learning_rate = self.optimizer.step()
        if self.is_output_rank:
            metrics.mean(f"{self.role}/grad_norm", grad_norm)
            metrics.mean(f"{self.role}/lr", learning_rate)
        return metrics

    def sum_over_data_parallel(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over the data-parallel ranks."""
        return self._over_data_parallel(values, dist.ReduceOp.SUM)

    def max_over_data_parallel(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over the data-parallel ranks."""
        return self._over_data_parallel(values, dist.ReduceOp.MAX)

    def gather_over_data_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """[n] float32 of every data-parallel rank, [ranks, n] on the host."""
        group = mpu.get_data_parallel_group()
        mine = values.to(self.device.current(), torch.float32)
        of_all = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(of_all, mine, group=group)
        return torch.stack(of_all).cpu()

    def _mean_over_all(self, metric: Metric | None) -> float:
        """Mean of what all ranks know of a metric; several may know the same."""
        known = [0.0, 0.0] if metric is None else [metric.value, metric.weight]
        total = torch.tensor(known, dtype=torch.float32, device=self.device.current())
        dist.all_reduce(total)
        value, weight = total.tolist()
        return value / weight if weight else 0.0

    def _over_data_parallel(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        result = torch.tensor(values, dtype=torch.float32, device=self.device.current())
        dist.all_reduce(result, operation, group=mpu.get_data_parallel_group())
        return result.tolist()

    # ---- memory --------------------------------------------------------------------------------------------------

    def offload(self, part: str) -> None:
        """Move "param", "grad" (dropped), "optimizer" or "reference" off the device; a no-op if it is away."""
        if part == "param":
            self.offload("base")
        if self._away[part].is_away:
            return
        buffers = [b for chunk in self.actor for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        parameters = [p for chunk in self.actor for p in chunk.parameters()]
        tensors: dict[str, Sequence[torch.Tensor]] = {
            "param": [buffer.param_data for buffer in buffers if buffer.param_data is not None],
            "grad": [buffer.grad_data for buffer in buffers],
            "optimizer": self.optimizer.tensors(),
            "reference": [p for chunk in self.reference for p in chunk.parameters()],
            "base": [p for p in parameters if self.cfg.lora_r and not p.requires_grad],
        }
        # without the distributed optimizer every parameter has a storage of its own
        whole = [p for p in parameters if p.requires_grad or not self.cfg.lora_r]
        chosen = tensors[part] or (whole if part == "param" else [])
        self._away[part].offload(chosen)

    def onload(self, part: str) -> None:
        """Bring such a part back; a no-op if it is not away.

        The optimizer's copies may go on beside forward and backward passes, until its state is used.
        """
        if part == "param":
            self.onload("base")
        self._away[part].onload()
        if part != "optimizer":
            self._away[part].ready()

    # ---- state ---------------------------------------------------------------------------------------------------

    def pieces(self, optimizer: bool) -> list[Piece]:
        """This rank's share of weights and, if asked for, optimizer state; memory in use, not copies."""
        if optimizer:
            self._away["optimizer"].ready()
        state = self.optimizer if optimizer else None
        return [piece for sharding in self._shardings() for piece in pieces_to_write(sharding, state)]

    def rank_state(self, optimizer: bool, rng: bool) -> dict[str, Any]:
        """Small state beside the pieces, as tensors and plain Python values."""
        state = self.optimizer.state_dict() if optimizer else {}
        if rng:
            state["rng"] = {**self.device.rng_state(), "tracker": dict(get_cuda_rng_tracker().get_states())}
        return state

    def load_state(self, tensors: StoredTensors, state: Mapping[str, Any], optimizer: bool) -> None:
        """Restore what ranks of this or any other layout wrote of `pieces`, and `rank_state` of one of them.

        Raises:
            CheckpointError: a weight is missing or has another shape, or optimizer state was asked for and is not
                there.
        """
        if optimizer and "scheduler" not in state:
            raise CheckpointError("the checkpoint was saved without optimizer state: set no_load_optim: true")
        self._away["optimizer"].ready()
        if optimizer:
            self.optimizer.load_state_dict(state)
        for sharding in self._shardings():
            read_pieces(sharding, tensors, self.optimizer if optimizer else None)
        if not optimizer:
            self.optimizer.reload_weights()

    def load_rng(self, state: Mapping[str, Any], iteration: int) -> None:
        """Restore the generators' state, or if there is none because it was of another layout, seed them anew.

        The new seed depends on `seed` and the iteration, so that no stream of the run so far begins once more.
        """
        if "rng" in state:
            self.device.set_rng_state(state["rng"])
            get_cuda_rng_tracker().set_states(state["rng"]["tracker"])
        else:
            seed = int(np.random.SeedSequence([self.cfg.seed, iteration]).generate_state(1)[0])
            self.device.manual_seed(seed)
            model_parallel_cuda_manual_seed(seed)

    def _shardings(self) -> list[Sharding]:
        """All that is trained, by what their names in a checkpoint begin with."""
        return [Sharding(self.model_config, self.layout, self._trained_parameters(), self._trained_prefix)]

    @property
    def _trained_prefix(self) -> str:
        return self.state_prefix + (ADAPTERS if self.cfg.lora_r else "")

    def _trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What a checkpoint has to hold: adapters in place of what they leave as it was."""
        parameters = self._actor_parameters()
        return {name: p for name, p in parameters.items() if p.requires_grad or not self.cfg.lora_r}


def _none_if_alone(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if group.size() > 1 else None
