"""Checkpoints of a training engine, without a driver: all ranks call these together."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from mindspeed_rl.checkpoint.state import CheckpointReader, CheckpointStore
from mindspeed_rl.config.schema import MegatronConfig

if TYPE_CHECKING:
    from mindspeed_rl.engine.megatron.engine import MegatronEngine


class Sizes:
    """The layout of a world, as checkpoints record it."""

    def __init__(self, cfg: MegatronConfig):
        self.world = dist.get_world_size()
        self.tp, self.pp = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size
        self.dp = self.world // (self.tp * self.pp * cfg.context_parallel_size)
        self.ep = cfg.expert_model_parallel_size


def save(
    engine: "MegatronEngine",
    root: Path | str,
    optimizer: bool = True,
    rng: bool = True,
    start_weights: str | None = None,
) -> Path:
    """Write checkpoint 1 below `root`, with Hugging Face weights if `start_weights` is given; returns its folder."""
    rank = dist.get_rank()
    store = CheckpointStore(root, start_weights, model=engine.backbone, layout=Sizes(engine.cfg))
    if rank == 0:
        store.begin(1)
    dist.barrier()
    CheckpointStore(root).write_rank(1, rank, engine.pieces(optimizer), engine.rank_state(optimizer, rng))
    dist.barrier()
    if rank == 0:
        state = {"lora": engine.cfg.lora_settings, "start_weights": start_weights}
        store.commit(1, state, hf_weights=start_weights is not None)
    dist.barrier()
    return Path(root) / "iter_0000001"


def load(engine: "MegatronEngine", path: Path | str, optimizer: bool = True, rng: bool = True) -> None:
    """Go on from a checkpoint, whatever layout wrote it."""
    reader = CheckpointReader(path)
    reader.check_tensors(dist.get_rank(), dist.get_world_size())
    state = reader.load_rank(dist.get_rank(), Sizes(engine.cfg))
    engine.load_state(reader.tensors, state, optimizer)
    if rng:
        engine.load_rng(state, iteration=1)
