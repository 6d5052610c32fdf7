"""The rollout worker: generation in a process and on a device of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch

from mindspeed_rl.common.timing import Timings
from mindspeed_rl.device.base import Device
from mindspeed_rl.transfer_dock.spec import TransferDock
from mindspeed_rl.workers.context import Worker, WorkerReport
from mindspeed_rl.workers.profiling import profiled
from mindspeed_rl.workers.rollout import Rollout, vllm_engine
from mindspeed_rl.workers.validation import update_and_validate
from mindspeed_rl.workers.weights import unpack_weights


class RolloutWorker(Worker):
    """One rank that generates, with the newest weights that the training ranks have published."""

    def prepare(self, device: Device) -> None:
        """Megatron runs in other processes: what adapts it would only get in vLLM's way."""
        device.install()

    def start(self, address: str, dock: TransferDock, hf_folder: str, stop_tokens: Sequence[int], board: Any) -> None:
        """Join the world at `address` and build the engine; its weights will come from `board`, a `WeightBoard`."""
        self.join(address, self.layout.rollout_world, dock)
        self.board, self.loaded = board, False
        self.rollout = Rollout(self.context, vllm_engine(self.context, hf_folder, stop_tokens))

    @profiled("rollout")
    def generate(self, iteration: int, wave: int) -> WorkerReport:
        """Generate this replica's share of an iteration's or wave's responses, with the newest weights there are.

        The dock hands prompts out once the policy is at most `staleness` versions behind, and weights are published
        before that: what is newest then is new enough.
        """
        timings = Timings(iteration)
        self.context.memory.reset()
        with timings.waiting("rollout"):
            claims = self.rollout.claim(iteration)
        self._take_weights(timings)
        assert iteration - self.rollout.version <= self.config.rl_config.staleness, "the dock bounds staleness"
        with timings("rollout"):
            self.rollout.generate(iteration, claims, wave)
        return self.context.report(timings)

    def validate(self, iteration: int, prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Answer this replica's share of prompts to validate on, with the newest weights (see `Rollout.validate`)."""
        self._take_weights(Timings(iteration))
        return self.rollout.validate(iteration, prompts)

    def _take_weights(self, timings: Timings) -> None:
        """Bring the engine to the newest version there is, the same on all ranks of the engine."""
        validate = self.config.generate_config.validate_weight
        with timings("validate_weight" if validate else "resharding_to_infer"):
            version = self.rollout.group.share(lambda: ray.get(self.board.newest.remote()))
            if self.loaded and version == self.rollout.version:
                return
            published = ray.get(self.board.get.remote(version))

            def weights() -> Iterator[tuple[str, torch.Tensor]]:
                return unpack_weights(ray.get(ref) for ref in published.refs)

            if validate:
                engine, expected = self.rollout.engine, published.checksums
                update_and_validate(engine, weights, expected, version, self.number)
            else:
                self.rollout.engine.update_weights(weights())
            self.rollout.version, self.loaded = version, True
