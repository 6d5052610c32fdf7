"""The worker of stages that learn from given responses: one rank that trains, and nothing else on its device."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl.common.timing import Timings
from mindspeed_rl.data.supervised import SupervisedRow
from mindspeed_rl.workers.context import Source, Worker, WorkerReport
from mindspeed_rl.workers.profiling import profiled
from mindspeed_rl.workers.supervised import Shares, Supervised


class SupervisedWorker(Worker):
    """One rank. All ranks are called with the same arguments."""

    def start(self, address: str, source: Source) -> None:
        """Join the world at `address`, build the engine and load weights and state from `source`."""
        self.join(address, self.layout.world, None)
        self.role = Supervised(self.context, self.model, source)

    @profiled("update")
    def update(self, iteration: int, rows: Sequence[SupervisedRow], shares: Shares) -> WorkerReport:
        """One optimizer step on `rows`."""
        self.context.memory.reset()
        timings = Timings(iteration)
        return self.context.report(timings, self.role.update(rows, shares, timings))

    def validate(self, iteration: int, rows: Sequence[SupervisedRow], shares: Shares) -> WorkerReport:
        """The objective's metrics of `rows`."""
        timings = Timings(iteration)
        return self.context.report(timings, self.role.validate(rows, shares, timings))

    def save(self, root: str, iteration: int) -> None:
        """Write this rank's part of a checkpoint that the driver has begun; with `async_save`, begin to write it."""
        self.role.checkpoints.save(root, iteration, self.role.engine)

    def finish_save(self) -> None:
        """Wait for the part that `save` has begun to write."""
        self.role.checkpoints.writer.wait()
