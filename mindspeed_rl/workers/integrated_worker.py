"""The integrated worker: actor, reference and rollout in one process on one device."""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_rl.algorithms.aggregation import count
from mindspeed_rl.algorithms.mismatch import mismatch_metrics
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.checkpoint.hf import HFWeights, is_hf_folder
from mindspeed_rl.checkpoint.state import CheckpointStore, load_rank
from mindspeed_rl.common.logging import setup_logging
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.common.timing import Timings
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.select import make_device
from mindspeed_rl.transfer_dock.spec import Claim, TransferDock
from mindspeed_rl.types import Denominators, RolloutBatch
from mindspeed_rl.workers.control import ControlGroup
from mindspeed_rl.workers.stages import SCORING, scoring_stages, uses_reference

if TYPE_CHECKING:
    from mindspeed_rl.engine.base import Generation, GenerationEngine, TrainingEngine

logger = logging.getLogger(__name__)

# engine steps between two looks at the dock while generating
STEPS_BETWEEN_SCORING = 8


@dataclass
class WorkerReport:
    """What one rank says about one stage."""

    rank: int
    seconds: dict[str, float]  # stage -> wall-clock seconds
    metrics: MetricSet = field(default_factory=MetricSet)
    peak_memory_bytes: int = 0  # on the device, since the run started
    peak_host_bytes: int = 0  # of this process
    peak_flops: float | None = None  # of the device at the training precision, where known


@dataclass(frozen=True)
class Source:
    """Where a run's weights and state come from."""

    hf_folder: str  # configuration and tokenizer files in Hugging Face form
    weights: str  # Hugging Face folder or checkpoint folder: start of actor and reference
    state: str | None = None  # checkpoint whose actor, optimizer and RNG the run goes on from
    load_optim: bool = True
    load_rng: bool = True


class IntegratedWorker:
    """One rank. Every method is one stage of a step; all ranks are called with the same arguments."""

    def __init__(self, rank: int, config: Config, layout: Layout, model: ModelConfig, log_folder: str):
        setup_logging(log_folder, f"rank_{rank:05d}", capture=True)
        self.rank, self.config, self.layout, self.model = rank, config, layout, model
        self.rl, self.sampling = config.rl_config, config.generate_config.sampling_config
        self.temperature = self.sampling.temperature

    # ---- start-up ------------------------------------------------------------------------------------------------

    def address(self) -> str:
        """`host:port` on which rank 0 can be reached."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, address: str, dock: TransferDock, source: Source, stop_tokens: Sequence[int]) -> None:
        """Join the world at `address`, build both engines and load weights and state from `source`."""
        self.dock = dock
        self.device = make_device(self.config.device)
        self.device.install()
        self.device.select(0)  # Ray shows each worker its own device only
        logger.info(
            "%s of %d visible, %.1f GiB", self.device.name, self.device.count(), self.device.total_memory() / 2**30
        )
        host, port = address.rsplit(":", 1)
        os.environ.update(
            MASTER_ADDR=host, MASTER_PORT=port, RANK=str(self.rank), WORLD_SIZE=str(self.layout.world), LOCAL_RANK="0"
        )
        minutes = self.config.actor.distributed_timeout_minutes
        dist.init_process_group(self.device.collectives_backend, timeout=timedelta(minutes=minutes))
        ranks = range(self.layout.world)
        # the last pipeline stage's first rank holds the log-probs, so it speaks for its model replica
        self.replica = ControlGroup(
            self.layout.model_replicas(), self.rank, minutes, leader=lambda members: members[-self.layout.tp]
        )
        size = self.layout.infer_tp
        self.rollout_group = ControlGroup([ranks[i : i + size] for i in ranks[::size]], self.rank, minutes)
        self.cell = ControlGroup(self.layout.cells(), self.rank, minutes)
        self._build_engines(source, stop_tokens)
        self._load_state(source)

    def _build_engines(self, source: Source, stop_tokens: Sequence[int]) -> None:
        from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state
        from mindspeed_rl.engine.vllm.engine import VllmEngine

        generate, actor = self.config.generate_config, self.config.actor
        replica_seed = actor.seed + self.layout.rollout_replica(self.rank)
        # vLLM first: it measures free memory, which is all there at this point
        self.rollout: GenerationEngine = VllmEngine(
            generate, source.hf_folder, self.device, replica_seed, stop_tokens
        )
        self.rollout.sleep()
        initialize_parallel_state(actor)
        self.training: TrainingEngine = MegatronEngine(
            actor,
            self.model,
            self.device,
            self.layout.total_optimizer_steps,
            self._start_weights(source.weights),
            with_reference=uses_reference(self.config),
        )
        if generate.offload_reference and uses_reference(self.config):
            self.training.offload("reference")
        self.objective = PolicyObjective(self.rl, horizon=self.sampling.max_tokens)

    def _start_weights(self, path: str) -> HFWeights | dict[str, torch.Tensor]:
        if is_hf_folder(path):
            return HFWeights(path)
        return load_rank(path, self.rank, self.layout)["model"]

    def _load_state(self, source: Source) -> None:
        if source.state is not None:
            state = load_rank(source.state, self.rank, self.layout)
            self.training.load_state_dict(state, optimizer=source.load_optim, rng=source.load_rng)

    # ---- stages --------------------------------------------------------------------------------------------------

    def enter_rollout(self) -> WorkerReport:
        """Reshard the actor's weights into the rollout engine and make room for its KV cache."""
        timings, generate = Timings(), self.config.generate_config
        self.device.reset_peak_memory()  # a step starts here
        self._offload(timings, "grad", "optimizer")  # first: both engines' weights are there at once for a while
        with timings("resharding_to_infer"):
            self.training.onload("param")
            self.rollout.wake_up("weights")
            bucket = int(generate.resharding_bucket_mb * 2**20)
            self.rollout.update_weights(self.training.export_weights(bucket))
        self._offload(timings, "param")
        with timings("offload"):
            self.rollout.wake_up("kv_cache")
        return self._report(timings)

    def _offload(self, timings: Timings, *parts: str) -> None:
        with timings("offload"):
            for part in parts:
                if getattr(self.config.generate_config, f"offload_train_{part}"):
                    self.training.offload(part)

    def generate(self, iteration: int) -> WorkerReport:
        """Generate this rollout replica's share of the iteration's responses."""
        timings = Timings()
        with timings("rollout"):
            self._generate(iteration, [])
        return self._report(timings)

    def score(self, iteration: int, stage: str) -> WorkerReport:
        """Compute this replica's share of `stage` ("reference" or "old_log_prob")."""
        timings = Timings()
        self._leave_rollout(timings)
        with timings(SCORING[stage].timing):
            self._score(iteration, stage)
        return self._report(timings)

    def generate_and_score(self, iteration: int) -> WorkerReport:
        """Generate; score what is complete in between and, without waiting for other replicas, the rest after."""
        timings, stages, generate = Timings(), scoring_stages(self.config), self.config.generate_config
        away = {"old_log_prob": generate.offload_train_param, "reference": generate.offload_reference}
        overlap = [stage for stage in stages if not away[stage]]
        with timings("rollout"):
            self._generate(iteration, overlap)
        self._leave_rollout(timings)
        for stage in stages:
            with timings(SCORING[stage].timing):
                self._score(iteration, stage)
        return self._report(timings)

    def update(self, iteration: int, kl_coef: float) -> WorkerReport:
        """Train on the iteration's samples: `epochs` passes, one optimizer step a mini-batch."""
        timings, metrics = Timings(), MetricSet()
        self._leave_rollout(timings)
        with timings("offload"):
            self.training.onload("grad")
            self.training.onload("optimizer")
        with timings("update"):
            mini_batches = []
            for claim, batch in self._claims("update", iteration):
                if self.rl.epochs > 1:
                    mini_batches.append(batch)
                metrics.merge(self._train(batch, kl_coef))
                if self.replica.is_leader:
                    self.dock.ack(claim)
            for _ in range(1, self.rl.epochs):
                for batch in mini_batches:
                    metrics.merge(self._train(batch, kl_coef))
        report = self._report(timings)
        report.metrics = metrics
        return report

    def save(self, root: str, iteration: int) -> None:
        """Write this rank's part of a checkpoint that the driver has begun and will commit."""
        for part in ("param", "optimizer"):
            self.training.onload(part)
        actor = self.config.actor
        state = self.training.state_dict(optimizer=not actor.no_save_optim, rng=not actor.no_save_rng)
        CheckpointStore(root).write_rank(iteration, self.rank, state)

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _leave_rollout(self, timings: Timings) -> None:
        with timings("resharding_to_train"):
            self.rollout.sleep()
            self.training.onload("param")

    def _claims(self, consumer: str, iteration: int) -> Iterator[tuple[Claim, RolloutBatch]]:
        """This model replica's share of `consumer`, one mini-batch after the other, as every rank's own batch."""
        while (claim := self._claim(consumer, iteration, self.layout.sequences_per_mini_batch_per_rank)) is not None:
            yield claim, self._fetch(claim)

    def _claim(self, consumer: str, iteration: int, count: int) -> Claim | None:
        share, timeout = self.training.data_parallel_rank, 60 * self.rl.stage_timeout_minutes
        return self.replica.share(lambda: self.dock.claim(consumer, iteration, count, share, timeout))

    def _fetch(self, claim: Claim) -> RolloutBatch:
        needs = self.dock.spec.consumers[claim.consumer].needs
        columns = self.dock.get(claim, needs)
        return RolloutBatch(columns.pop("prompt_ids"), columns.pop("responses"), columns)

    def _generate(self, iteration: int, scoring: Sequence[str]) -> None:
        """Drive the rollout engine through this replica's share, scoring complete samples in between."""
        if not self.config.generate_config.per_request_seed:
            # the engine draws from the process's generator: from here on as a resumed run would
            self.device.manual_seed(self._seed(iteration, self.layout.rollout_replica(self.rank)))
        steps = self._generation_steps(iteration)
        while True:
            finished = all_done = False
            for _ in range(STEPS_BETWEEN_SCORING):
                finished = next(steps, None) is None
                if finished:
                    break
            if not scoring:
                all_done = finished
            else:
                # ranks that share a model replica or a rollout engine take turns together
                all_done = not self.cell.any(not finished)
                for stage in scoring:
                    self._score_what_is_ready(iteration, stage)
            if all_done:
                return

    def _generation_steps(self, iteration: int) -> Iterator[bool]:
        """Run the engine over all claims of this replica, a step at a time; finished groups go to the dock."""
        from mindspeed_rl.engine.base import GenerationRequest

        while True:
            claims = self.rollout_group.share(lambda: self._claim_prompts(iteration))
            if not claims:
                return
            requests = [
                GenerationRequest(row, prompt, self._request_seed(iteration, row))
                for claim in claims
                for row, prompt in zip(claim.rows, self.dock.get(claim, ("prompt_ids",))["prompt_ids"], strict=True)
            ]
            group_size = self.rl.n_samples_per_prompt
            claimed = Counter(request.row // group_size for request in requests)  # a share may end within a group
            finished: dict[int, list[Generation]] = {}
            for generations in self.rollout.generate(requests):
                complete: list[Generation] = []
                for generation in generations:
                    group = generation.row // group_size
                    finished.setdefault(group, []).append(generation)
                    if len(finished[group]) == claimed[group]:
                        complete += finished.pop(group)
                if complete:
                    self._put_generations(iteration, complete)
                yield True
            if self.rollout_group.is_leader:
                for claim in claims:
                    self.dock.ack(claim)

    def _claim_prompts(self, iteration: int) -> list[Claim]:
        """All that is ready for this rollout replica: the engine must not run dry at a mini-batch's end."""
        share, timeout = self.layout.rollout_replica(self.rank), 60 * self.rl.stage_timeout_minutes
        rows = self.layout.sequences_per_iteration
        claims: list[Claim] = []
        claim: Any = self.dock.claim("rollout", iteration, rows, share, timeout)
        while isinstance(claim, Claim):
            claims.append(claim)
            claim = self.dock.try_claim("rollout", iteration, rows, share)
        return claims

    def _request_seed(self, iteration: int, row: int) -> int | None:
        """A seed for one sample, the same under every layout."""
        return self._seed(iteration, row) if self.config.generate_config.per_request_seed else None

    def _seed(self, iteration: int, number: int) -> int:
        # splitmix-like spreading keeps neighbouring (seed, iteration, number) far apart
        mixed = (self.config.actor.seed * 0x9E3779B97F4A7C15 + iteration * 0xBF58476D1CE4E5B9 + number) & (2**64 - 1)
        return ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) % 2**31

    def _put_generations(self, iteration: int, generations: list[Generation]) -> None:
        if not self.rollout_group.is_leader:
            return
        columns: dict[str, list[Any]] = {
            "responses": [torch.tensor(g.tokens, dtype=torch.int64) for g in generations]
        }
        if self.sampling.logprobs:
            columns["rollout_log_probs"] = [torch.tensor(g.log_probs, dtype=torch.float32) for g in generations]
        if self.sampling.detokenize:
            columns["texts"] = [g.text for g in generations]
        self.dock.put(iteration, [g.row for g in generations], columns)

    def _score(self, iteration: int, stage: str) -> None:
        is_reference = stage == "reference"
        if is_reference:
            self.training.onload("reference")
        for claim, batch in self._claims(stage, iteration):
            self._put_log_probs(claim, batch)
        if is_reference and self.config.generate_config.offload_reference:
            self.training.offload("reference")

    def _score_what_is_ready(self, iteration: int, stage: str) -> None:
        """At most one micro-batch, so that generation is not held up for long."""
        count, share = self._micro_batch_size(stage), self.training.data_parallel_rank
        claim = self.replica.share(lambda: self.dock.try_claim(stage, iteration, count, share))
        if isinstance(claim, Claim):  # else: nothing is ready yet, or nothing is left
            self._put_log_probs(claim, self._fetch(claim))

    def _micro_batch_size(self, stage: str) -> int:
        sizes = {
            "reference": self.rl.ref_forward_micro_batch_size,
            "old_log_prob": self.rl.actor_forward_micro_batch_size,
        }
        return sizes[stage]

    def _put_log_probs(self, claim: Claim, batch: RolloutBatch) -> None:
        stage = claim.consumer
        values = self.training.log_probs(
            batch, self._micro_batch_size(stage), self.temperature, reference=stage == "reference"
        )
        if self.replica.is_leader:
            assert values is not None, "the leader of a model replica is its output rank"
            self.dock.put(claim.iteration, claim.rows, {SCORING[stage].column: values})
            self.dock.ack(claim)

    def _train(self, batch: RolloutBatch, kl_coef: float) -> MetricSet:
        local = count(torch.cat(batch.columns["loss_mask"]), batch.response_lengths)
        denominators = Denominators(*self.training.sum_over_data_parallel([local.tokens, local.sequences]))

        def loss(
            micro: RolloutBatch, log_probs: torch.Tensor, entropy: torch.Tensor | None
        ) -> tuple[torch.Tensor, MetricSet]:
            columns = {name: torch.cat(values).to(log_probs.device) for name, values in micro.columns.items()}
            old = columns.get("old_log_probs", log_probs.detach())
            value, metrics = self.objective(
                log_probs=log_probs,
                entropy=entropy,
                old_log_probs=old,
                ref_log_probs=columns.get("reference_log_probs"),
                advantages=columns["advantages"],
                mask=columns["loss_mask"],
                response_lengths=micro.response_lengths.to(log_probs.device),
                denominators=denominators,
                kl_coef=kl_coef,
            )
            if "rollout_log_probs" in columns:
                metrics.merge(mismatch_metrics(old, columns["rollout_log_probs"], columns["loss_mask"]))
            return value, metrics

        return self.training.train_mini_batch(
            batch, loss, self.config.actor.micro_batch_size, self.temperature, entropy=True
        )

    def _report(self, timings: Timings) -> WorkerReport:
        return WorkerReport(
            self.rank,
            timings.seconds,
            peak_memory_bytes=self.device.max_memory_allocated(),
            peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
            peak_flops=self.device.peak_flops(self.config.actor.bf16),
        )
