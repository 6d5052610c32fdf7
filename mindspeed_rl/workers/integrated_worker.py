"""The integrated worker: actor, reference and rollout in one process on one device."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl.common.logging import setup_logging
from mindspeed_rl.common.timing import Timings
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.transfer_dock.spec import TransferDock
from mindspeed_rl.workers.context import Source, WorkerReport, free_address, join_world
from mindspeed_rl.workers.control import ControlGroup
from mindspeed_rl.workers.rollout import Rollout
from mindspeed_rl.workers.stages import SCORING, scoring_stages
from mindspeed_rl.workers.training import Training

# engine steps between two looks at the dock while generating
STEPS_BETWEEN_SCORING = 8


class IntegratedWorker:
    """One rank with both roles, which take turns on its device: when one enters, the other makes room.

    Every method is one stage of a step; all ranks are called with the same arguments.
    """

    def __init__(self, rank: int, config: Config, layout: Layout, model: ModelConfig, log_folder: str):
        setup_logging(log_folder, f"rank_{rank:05d}", capture=True)
        self.rank, self.config, self.layout, self.model = rank, config, layout, model

    def address(self) -> str:
        """`host:port` on which rank 0 can be reached."""
        return free_address()

    def start(self, address: str, dock: TransferDock, source: Source, stop_tokens: Sequence[int]) -> None:
        """Join the world at `address`, build both engines and load weights and state from `source`."""
        context = join_world(address, self.rank, self.layout.world, self.config, self.layout, dock)
        self.context = context
        self.cell = ControlGroup(self.layout.cells(), self.rank, context.collective_minutes)
        # rollout first: vLLM measures free memory, which is all there at this point
        self.rollout = Rollout(context, source.hf_folder, stop_tokens)
        self.training = Training(context, self.model, source)

    # ---- stages --------------------------------------------------------------------------------------------------

    def enter_rollout(self) -> WorkerReport:
        """Reshard the actor's weights into the rollout engine and make room for its KV cache."""
        timings = Timings()
        self.context.device.reset_peak_memory()  # a step starts here
        with timings("offload"):  # first: both engines' weights are there at once for a while
            self.training.offload("grad", "optimizer")
        with timings("resharding_to_infer"):
            self.rollout.update_weights(self.training.export_weights())
        with timings("offload"):
            self.training.offload("param")
            self.rollout.engine.wake_up("kv_cache")
        return self.context.report(timings)

    def generate(self, iteration: int) -> WorkerReport:
        """Generate this rollout replica's share of the iteration's responses."""
        timings = Timings()
        with timings("rollout"):
            self.rollout.generate(iteration)
        return self.context.report(timings)

    def score(self, iteration: int, stage: str) -> WorkerReport:
        """Compute this replica's share of `stage` ("reference" or "old_log_prob")."""
        timings = Timings()
        self._enter_training(timings)
        with timings(SCORING[stage].timing):
            self.training.score(iteration, stage)
        return self.context.report(timings)

    def generate_and_score(self, iteration: int) -> WorkerReport:
        """Generate; score what is complete in between and, without waiting for other replicas, the rest after."""
        timings, stages, generate = Timings(), scoring_stages(self.config), self.config.generate_config
        away = {"old_log_prob": generate.offload_train_param, "reference": generate.offload_reference}
        overlap = [stage for stage in stages if not away[stage]]
        with timings("rollout"):
            if overlap:
                self._generate_scoring(iteration, overlap)
            else:
                self.rollout.generate(iteration)
        self._enter_training(timings)
        for stage in stages:
            with timings(SCORING[stage].timing):
                self.training.score(iteration, stage)
        return self.context.report(timings)

    def update(self, iteration: int, kl_coef: float) -> WorkerReport:
        """Train on the iteration's samples: `epochs` passes, one optimizer step a mini-batch."""
        timings = Timings()
        self._enter_training(timings)
        with timings("offload"):
            self.training.engine.onload("grad")
            self.training.engine.onload("optimizer")
        with timings("update"):
            metrics = self.training.update(iteration, kl_coef)
        return self.context.report(timings, metrics)

    def save(self, root: str, iteration: int) -> None:
        """Write this rank's part of a checkpoint that the driver has begun and will commit."""
        self.training.save(root, iteration)

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _enter_training(self, timings: Timings) -> None:
        with timings("resharding_to_train"):
            self.rollout.engine.sleep()
            self.training.engine.onload("param")

    def _generate_scoring(self, iteration: int, scoring: Sequence[str]) -> None:
        """Drive the rollout engine through this replica's share, scoring complete samples in between."""
        steps, all_done = self.rollout.steps(iteration), False
        while not all_done:
            finished = any(next(steps, None) is None for _ in range(STEPS_BETWEEN_SCORING))
            # ranks that share a model replica or a rollout engine take turns together
            all_done = not self.cell.any(not finished)
            for stage in scoring:
                self.training.score_what_is_ready(iteration, stage)
