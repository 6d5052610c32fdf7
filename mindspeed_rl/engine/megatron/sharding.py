"""The actor's weights and optimizer state as rectangles of Hugging Face tensors, which do not depend on the layout.

Stored are, under the Hugging Face names of the weights, `model.` the weights, `optimizer.main.` their float32 copies
where there are any, and the moments `optimizer.exp_avg.` and `optimizer.exp_avg_sq.`. The second copy that pipeline
stages keep of a tied embedding is not stored, nor is the padding of a vocabulary. Names of a critic's model have
`critic.` before that, those of a value head on the actor's layers `value_head.`.

Every rank writes what it has: the distributed optimizer's ranges, which cut parameters anywhere, as up to three
rectangles each. Ranks that have the same divide it among them. So nothing has to be sent to be saved or loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_rl.checkpoint.state import WEIGHTS
from mindspeed_rl.checkpoint.tensors import LARGEST, Piece, StoredTensors
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.engine.megatron.optimizer import Optimizer, Shard
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import Parameter

OPTIMIZER = "optimizer."
MAIN = f"{OPTIMIZER}main."


@dataclass(frozen=True)
class Sharding:
    """Parameters of this rank, and its place in the layout."""

    model: ModelConfig
    layout: WeightLayout
    parameters: Mapping[str, torch.nn.Parameter]  # by name in the whole model, all or some
    role: str = ""  # before all names: there is more in a checkpoint than one language model

    @property
    def held(self) -> dict[str, Parameter]:
        """All that this rank has of the model."""
        _, pp_rank, replica = self.layout.coordinates(dist.get_rank())
        return self.layout.held(self.model, pp_rank, self.layout.expert_rank(replica))

    def shards(self, optimizer: Optimizer) -> Iterator[tuple[str, Shard]]:
        """What the optimizer keeps for these parameters, by their names."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        return ((names[shard.parameter], shard) for shard in optimizer.shards() if shard.parameter in names)

    def pieces(
        self, prefix: str, parameter: Parameter, elements: torch.Tensor, start: int = 0, most: int = 2**62
    ) -> Iterator[Piece]:
        """Pieces of consecutive elements of the flattened shard of a parameter, from `start` on."""
        tp_rank = self.layout.coordinates(dist.get_rank())[0]
        for slab in parameter.slabs(tp_rank, self.layout.tp, start, start + len(elements), most):
            yield Piece(self.role + prefix + slab.name, slab.shape, slab.offsets, slab.of_shard(elements, start))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def pieces_to_write(sharding: Sharding, optimizer: Optimizer | None) -> list[Piece]:
    """This rank's share of weights and, if given, optimizer state: all ranks together have everything once."""
    written = sharding.layout.written(sharding.model, dist.get_rank())
    shares = {name: share for name, share in written.items() if name in sharding.parameters}
    held = sharding.held
    pieces: list[Piece] = []
    for name, share in shares.items():
        elements = _flat(sharding.parameters[name])[share.start : share.stop]
        pieces += sharding.pieces(WEIGHTS, held[name], elements, share.start, LARGEST)
    if optimizer is None:
        return pieces
    for name, shard in sharding.shards(optimizer):
        if name not in shares:
            continue
        share = range(shard.main.numel()) if shard.is_partial else shares[name]
        kept = {f"{OPTIMIZER}{moment}.": tensor for moment, tensor in shard.moments.items()}
        if optimizer.keeps_main_weights:
            kept[MAIN] = shard.main
        for prefix, tensor in kept.items():
            elements = _flat(tensor)[share.start : share.stop]
            pieces += sharding.pieces(prefix, held[name], elements, shard.start + share.start, LARGEST)
    return pieces


@torch.no_grad()
def read_pieces(sharding: Sharding, tensors: StoredTensors, optimizer: Optimizer | None = None) -> None:
    """Fill this rank's parameters and, if given, what its optimizer keeps, whatever precision and layout wrote it.

    Raises:
        CheckpointError: something is missing or has another shape.
    """
    held = sharding.held
    main = MAIN if tensors.names(sharding.role + MAIN) else WEIGHTS
    of_model = main if optimizer is not None and not optimizer.keeps_main_weights else WEIGHTS
    pieces: list[Piece] = []

    def fill(prefix: str, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        tensor.zero_()  # padding is in no piece
        pieces.extend(sharding.pieces(prefix, held[name], _flat(tensor), start))

    for name, parameter in sharding.parameters.items():
        fill(of_model, name, parameter)
    if optimizer is not None:
        for name, shard in sharding.shards(optimizer):
            if optimizer.keeps_main_weights:
                fill(main, name, shard.main, shard.start)
            for moment, tensor in shard.moments.items():
                fill(f"{OPTIMIZER}{moment}.", name, tensor, shard.start)
    tensors.read(pieces)
