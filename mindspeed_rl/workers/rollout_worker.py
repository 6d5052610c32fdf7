"""The rollout worker: generation in a process and on a device of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from mindspeed_rl.common.timing import Timings
from mindspeed_rl.transfer_dock.spec import TransferDock
from mindspeed_rl.workers.context import Worker, WorkerReport
from mindspeed_rl.workers.rollout import Rollout, vllm_engine
from mindspeed_rl.workers.weights import unpack_weights


class RolloutWorker(Worker):
    """One rank that generates, with the newest weights that the training ranks have published."""

    def start(self, address: str, dock: TransferDock, hf_folder: str, stop_tokens: Sequence[int], board: Any) -> None:
        """Join the world at `address` and build the engine; its weights will come from `board`, a `WeightBoard`."""
        self.join(address, self.layout.rollout_world, dock)
        self.board, self.loaded = board, False
        self.rollout = Rollout(self.context, vllm_engine(self.context, hf_folder, stop_tokens))

    def generate(self, iteration: int) -> WorkerReport:
        """Generate this rollout replica's share of the iteration's responses, with the newest weights there are.

        The dock hands prompts out once the policy is at most `staleness` versions behind, and weights are published
        before that: what is newest then is new enough.
        """
        timings = Timings(iteration)
        self.context.device.reset_peak_memory()
        with timings.waiting("rollout"):
            claims = self.rollout.claim(iteration)
        with timings("resharding_to_infer"):
            self._take_weights()
        assert iteration - self.rollout.version <= self.config.rl_config.staleness, "the dock bounds staleness"
        with timings("rollout"):
            self.rollout.generate(iteration, claims)
        return self.context.report(timings)

    def _take_weights(self) -> None:
        """Bring the engine to the newest version there is, the same on all ranks of the engine."""
        version = self.rollout.group.share(lambda: ray.get(self.board.newest.remote()))
        if not self.loaded or version != self.rollout.version:
            refs = ray.get(self.board.get.remote(version))
            self.rollout.engine.update_weights(unpack_weights(ray.get(ref) for ref in refs))
            self.rollout.version, self.loaded = version, True
