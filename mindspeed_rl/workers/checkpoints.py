"""What a rank that trains reads of checkpoints, and writes into them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from mindspeed_rl.checkpoint.background import BackgroundWriter
from mindspeed_rl.checkpoint.hf import HFWeights, is_hf_folder
from mindspeed_rl.checkpoint.state import CheckpointReader, CheckpointStore
from mindspeed_rl.checkpoint.tensors import StoredTensors
from mindspeed_rl.workers.context import Context, Source

if TYPE_CHECKING:
    from mindspeed_rl.engine.base import TrainingEngine


class Checkpoints:
    """Of one rank's engines.

    Args:
        context: this rank's place in the run.
    """

    def __init__(self, context: Context):
        self.rank, self.layout, self.actor = context.rank, context.layout, context.config.actor
        self.writer = BackgroundWriter(context.device)

    def weights(self, path: str) -> HFWeights | StoredTensors:
        """Those of a Hugging Face folder or a checkpoint (a collective)."""
        return HFWeights(path) if is_hf_folder(path) else self._open(path).tensors

    def _open(self, path: str) -> CheckpointReader:
        """A checkpoint whose tensors the ranks have checked together, each some of the files (a collective)."""
        checkpoint = CheckpointReader(path)
        checkpoint.check_tensors(self.rank, self.layout.world)
        dist.barrier()
        return checkpoint

    def restore(self, source: Source, engine: TrainingEngine, critic: TrainingEngine | None = None) -> None:
        """Go on from the state that `source` names, if it names one (a collective)."""
        if source.state is None:
            return
        checkpoint = self._open(source.state)
        state = checkpoint.load_rank(self.rank, self.layout)
        engine.load_state(checkpoint.tensors, state, optimizer=source.load_optim)
        if critic is not None:
            critic.load_state(checkpoint.tensors, state["critic"], optimizer=source.load_optim)
        if source.load_rng:
            engine.load_rng(state, checkpoint.trainer["iteration"])

    def save(self, root: str, iteration: int, engine: TrainingEngine, critic: TrainingEngine | None = None) -> None:
        """Write this rank's part of a checkpoint that the driver has begun and will commit."""
        optimizer = not self.actor.no_save_optim
        pieces = engine.pieces(optimizer)
        state = engine.rank_state(optimizer, rng=not self.actor.no_save_rng)
        if critic is not None:
            pieces += critic.pieces(optimizer)
            state["critic"] = critic.rank_state(optimizer, rng=False)
        write = self.writer.write if self.actor.async_save else CheckpointStore.write_rank
        write(CheckpointStore(root), iteration, self.rank, pieces, state)
