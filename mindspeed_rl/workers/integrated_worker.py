"""The integrated worker: actor, reference and rollout in one process on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mindspeed_rl.common.timing import Timings
from mindspeed_rl.config.layout import scored_stages, stages_beside_rollout
from mindspeed_rl.resharding.layout import RolloutLayout
from mindspeed_rl.transfer_dock.spec import TransferDock
from mindspeed_rl.workers.context import Source, WorkerReport
from mindspeed_rl.workers.control import ControlGroup
from mindspeed_rl.workers.profiling import profiled
from mindspeed_rl.workers.residency import ROLLOUT, Part, Step, after, before, may_leave
from mindspeed_rl.workers.rollout import Rollout, vllm_engine
from mindspeed_rl.workers.training import Training
from mindspeed_rl.workers.training_worker import TrainingWorker
from mindspeed_rl.workers.validation import update_and_validate

# engine steps between two looks at the dock while generating
STEPS_BETWEEN_SCORING = 8


class IntegratedWorker(TrainingWorker):
    """A training worker that also generates: the roles take turns on its device, and make room for each other."""

    def start(  # type: ignore[override]  # called through Ray, by those who know which worker it is
        self, address: str, dock: TransferDock, source: Source, stop_tokens: Sequence[int]
    ) -> None:
        """Join the world at `address`, build both engines and load weights and state from `source`."""
        self.join(address, self.layout.world, dock)
        self.rollout_layout = RolloutLayout.configured(self.config.generate_config)
        self.cell = ControlGroup(self.layout.cells(), self.rank, self.context.collective_minutes)
        # rollout first: vLLM measures free memory, which is all there at this point
        self.rollout = Rollout(self.context, vllm_engine(self.context, source.hf_folder, stop_tokens))
        self._sleep()
        self.rollout_parts: set[Part] = set()  # those that are on the device
        self.training = Training(self.context, self.model, source)
        self._leave(("reference", "reward_model"))

    @profiled("resharding")
    def enter_rollout(self, version: int) -> WorkerReport:
        """Reshard the actor's weights into the rollout engine and make room for its KV cache.

        version: iterations that they were trained on; rollout is of the next one.
        """
        timings = Timings(version)
        self.context.memory.reset()  # a step starts here
        self.enter("resharding", timings)
        if self.config.generate_config.validate_weight:
            with timings("validate_weight"):
                self._update_and_validate(version)
        else:
            with timings("resharding_to_infer"):
                self.rollout.engine.update_weights(self._weights())
        self.rollout.version = version
        self.enter("rollout", timings)
        return self.context.report(timings)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the rollout engine on this rank takes of the actor's weights (a collective)."""
        return self.training.export_weights(self.rollout_layout)

    def _update_and_validate(self, version: int) -> None:
        taken = self.rollout_layout.hf_names(self.model, self.rank)
        expected = {name: of for name, of in self.training.engine.weight_checksums().items() if name in taken}
        update_and_validate(self.rollout.engine, self._weights, expected, version, self.rank)

    def enter(self, use: str, timings: Timings) -> None:
        """Bring what a use of the device needs, and make room for it (see `residency`)."""
        self._follow(before(self.config, use), timings)

    def leave(self, use: str, timings: Timings) -> None:
        """Take away what only that use needs."""
        self._follow(after(self.config, use), timings)

    def _follow(self, steps: Sequence[Step], timings: Timings) -> None:
        for step in steps:
            with timings(step.timing):
                move = self._come if step.action == "onload" else self._leave
                move(step.parts)

    def _come(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part not in ROLLOUT:
                self.training.onload(part)
            elif part not in self.rollout_parts:
                self.rollout.engine.wake_up({"rollout_weights": "weights"}.get(part, part))
                self.rollout_parts.add(part)
                self.context.memory.asleep(self.rollout.engine.asleep_bytes)

    def _leave(self, parts: Sequence[Part]) -> None:
        if self.rollout_parts.intersection(parts):
            self._sleep()
            self.rollout_parts.clear()
        for part in parts:
            if part not in ROLLOUT and may_leave(self.config, part):
                self.training.offload(part)

    def _sleep(self) -> None:
        self.rollout.engine.sleep()
        self.context.memory.asleep(self.rollout.engine.asleep_bytes)

    @profiled("rollout")
    def generate(self, iteration: int, wave: int) -> WorkerReport:
        """Generate this rollout replica's share of the iteration's responses, or of a wave of them."""
        timings = Timings(iteration)
        with timings("rollout"):
            self.rollout.generate(iteration, wave=wave)
        return self.context.report(timings)

    def validate(self, iteration: int, prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Answer this replica's share of prompts to validate on (see `Rollout.validate`); then all is as before."""
        timings = Timings(iteration)
        responses = self.rollout.validate(iteration, prompts)
        self.leave("validation", timings)
        return responses

    @profiled("rollout")
    def generate_and_score(self, iteration: int) -> WorkerReport:
        """Generate; score what is complete in between and, without waiting for other replicas, the rest after."""
        timings = Timings(iteration)
        overlap = stages_beside_rollout(self.config, self.layout)
        with timings("rollout"):
            if overlap or self.layout.ep > 1:  # the latter end together, lest one waits in its pass for the others
                self._generate_scoring(iteration, overlap)
            else:
                self.rollout.generate(iteration)
        self._score(scored_stages(self.config), timings)
        return self.context.report(timings)

    def _generate_scoring(self, iteration: int, scoring: Sequence[str]) -> None:
        """Drive the rollout engine through this replica's share, scoring complete samples in between."""
        steps, all_done = self.rollout.steps(iteration), False
        while not all_done:
            finished = any(next(steps, None) is None for _ in range(STEPS_BETWEEN_SCORING))
            # ranks that share a model replica or a rollout engine take turns together
            all_done = not self.cell.any(not finished)
            for stage in scoring:
                self.training.score_what_is_ready(iteration, stage)
