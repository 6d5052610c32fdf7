"""The training worker: actor and reference in one process on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import ray

from mindspeed_rl.common.timing import Timings
from mindspeed_rl.transfer_dock.spec import TransferDock
from mindspeed_rl.workers.context import Source, Worker, WorkerReport
from mindspeed_rl.workers.profiling import profiled
from mindspeed_rl.workers.training import Training
from mindspeed_rl.workers.weights import PublishedWeights, pack_weights


class TrainingWorker(Worker):
    """One rank that trains. All ranks are called with the same arguments."""

    def start(self, address: str, dock: TransferDock, source: Source) -> None:
        """Join the world at `address`, build the engine and load weights and state from `source`."""
        self.join(address, self.layout.world, dock)
        self.training = Training(self.context, self.model, source)

    @profiled("resharding")
    def publish_weights(self, version: int) -> tuple[WorkerReport, PublishedWeights]:
        """Copy the actor's weights to Ray's object store; rank 0 returns where they are, the others nothing.

        `version` is the number of iterations that they were trained for.

        On the device two buckets of the export are in use at a time; on the host of rank 0 two buckets beside the
        object store, which takes one full copy of the weights. How long copies stay is up to the `WeightBoard`.
        """
        timings, refs, checksums = Timings(version), [], {}
        self.context.memory.reset()  # a step starts here
        with timings("export_weights"):
            weights = self.training.export_weights()
            if self.rank == 0:
                bucket_bytes = int(self.config.generate_config.resharding_bucket_mb * 2**20)
                refs = [ray.put(bucket) for bucket in pack_weights(weights, bucket_bytes)]
            else:
                deque(weights, maxlen=0)  # takes part in the collectives
        if self.config.generate_config.validate_weight:
            with timings("validate_weight"):
                checksums = self.training.engine.weight_checksums()
        return self.context.report(timings), PublishedWeights(refs, checksums)

    @profiled("scoring")
    def score(self, iteration: int, stages: Sequence[str]) -> WorkerReport:
        """Work off this model replica's share of `stages`, some of `scored_stages`, in their order."""
        timings = Timings(iteration)
        self._score(stages, timings)
        return self.context.report(timings)

    def _score(self, stages: Sequence[str], timings: Timings) -> None:
        for stage in stages:
            self.enter(stage, timings)
            self.training.score(stage, timings)
            self.leave(stage, timings)

    @profiled("update")
    def update(self, iteration: int, kl_coef: float) -> WorkerReport:
        """Train on the iteration's samples: `epochs` passes, one optimizer step a mini-batch."""
        timings = Timings(iteration)
        self.enter("update", timings)
        metrics = self.training.update(kl_coef, timings)
        self.leave("update", timings)
        return self.context.report(timings, metrics)

    def save(self, root: str, iteration: int) -> None:
        """Write this rank's part of a checkpoint that the driver has begun; with `async_save`, begin to write it."""
        self.training.save(root, iteration)

    def finish_save(self) -> None:
        """Wait for the part that `save` has begun to write."""
        self.training.checkpoints.writer.wait()

    def enter(self, use: str, timings: Timings) -> None:
        """Bring what a stage needs to a device that other roles use, too. Here none does."""

    def leave(self, use: str, timings: Timings) -> None:
        """Take away what only that stage needs."""
