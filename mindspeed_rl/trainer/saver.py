"""When a run's checkpoints are complete: at once, or with `async_save` while it trains on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, Protocol

from mindspeed_rl.checkpoint.state import CheckpointStore
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.schema import Config
from mindspeed_rl.workers.group import Watch

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.05  # at what ranks have written


class Writers(Protocol):
    """Workers that write parts of checkpoints: see `workers.fleet.Fleet`."""

    watch: Watch

    def save(self, root: str, iteration: int) -> Sequence[Any]: ...

    def finish_save(self, iteration: int) -> Sequence[Any]: ...


class Saver:
    """Takes the checkpoints of a run, at most one at a time.

    Args:
        config: the run's configuration.
        store: where they go.
        fleet: the workers, which write their parts.
        needed: a checkpoint that retention must not remove.
    """

    def __init__(self, config: Config, store: CheckpointStore, fleet: Writers, needed: str):
        self.actor, self.store, self.fleet, self.needed = config.actor, store, fleet, needed
        self.deadline_minutes = config.rl_config.stage_timeout_minutes
        self._thread = ThreadPoolExecutor(1, "saver")
        self._pending: Future[None] | None = None
        self._given_up = Event()

    def save(self, iteration: int, trainer_state: Mapping[str, Any], attachments: Mapping[str, Any] | None) -> None:
        """Take a checkpoint; with `async_save`, copy what is to be in it and leave the rest to a thread.

        Raises:
            CheckpointError: this or the one before could not be written.
        """
        self.wait()
        self.store.begin(iteration)
        self.fleet.watch.wait(self.fleet.save(str(self.store.root), iteration))
        if self.actor.async_save:
            self._iteration = iteration
            self._pending = self._thread.submit(self._complete, iteration, trainer_state, attachments)
        else:
            self._complete(iteration, trainer_state, attachments)

    def _complete(
        self, iteration: int, trainer_state: Mapping[str, Any], attachments: Mapping[str, Any] | None
    ) -> None:
        deadline = time.monotonic() + 60 * self.deadline_minutes
        while not self.store.is_written(iteration):
            if self._given_up.wait(SECONDS_BETWEEN_LOOKS):
                return
            if time.monotonic() > deadline:
                message = f"checkpoint {iteration} is not written after {self.deadline_minutes:g} minutes"
                raise CheckpointError(message)
        self.store.commit(iteration, trainer_state, attachments, hf_weights=self.actor.save_hf)
        if self.actor.keep_last is not None:
            self.store.retain(self.actor.keep_last, self.needed)

    def check(self) -> None:
        """Raise `CheckpointError` if the checkpoint that is being written has failed by now."""
        if self._pending is not None and self._pending.done():
            self._finish()

    def wait(self) -> None:
        """Until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: it has failed.
            WorkerFailed: a rank has died that may have been writing.
        """
        if self._pending is not None:
            self.fleet.watch.wait(self.fleet.finish_save(self._iteration))
            self._finish()

    def _finish(self) -> None:
        assert self._pending is not None
        error = self._pending.exception()  # waits; if that is interrupted, there still is something to wait for
        self._pending = None
        if error is not None:
            raise error

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        """The run ends: orderly, or stopped by its user or a scheduler, or by an error of this kind.

        After an error nothing is waited for: the rank that failed may be one that has not written.
        """
        if self._pending is not None and (kind is None or issubclass(kind, KeyboardInterrupt | SystemExit)):
            logger.info("waiting for checkpoint %d to be written", self._iteration)
            self._finish()  # ranks are not asked: they may be in the middle of a stage
        self._given_up.set()
        self._thread.shutdown(wait=False)
