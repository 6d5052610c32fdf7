"""How a model's parameters are spread over ranks: tensor parallelism, pipeline stages, replicas."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.layout import Chunks, pipeline_chunks
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.resharding.names import TIED_OUTPUT, Parameter, make_parameter, parameter_table


@dataclass(frozen=True)
class WeightLayout:
    """Ranks are numbered as Megatron does: tensor parallel fastest, then data, then pipeline parallel."""

    tp: int
    stages: Chunks
    dp: int = 1  # replicas: ranks that hold the same weights

    @classmethod
    def even(cls, model: ModelConfig, tp: int = 1, pp: int = 1, dp: int = 1) -> WeightLayout:
        """The same number of layers on every stage, in one chunk.

        Raises:
            CheckpointError: the layers cannot be divided evenly.
        """
        if model.num_layers % pp:
            raise CheckpointError(f"{model.num_layers} layers cannot be divided evenly over {pp} pipeline stages")
        return cls(tp, pipeline_chunks(model.num_layers, MegatronConfig(pipeline_model_parallel_size=pp)), dp)

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    def rank(self, tp_rank: int, pp_rank: int, replica: int = 0) -> int:
        """Global rank of a place in the layout."""
        return tp_rank + self.tp * (replica + self.dp * pp_rank)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp_rank, pp_rank, replica) of a global rank."""
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, replica = divmod(rest, self.dp)
        return tp_rank, pp_rank, replica

    def owned(self, model: ModelConfig, pp_rank: int) -> dict[str, Parameter]:
        """Parameters of a stage by name, each parameter of the model on exactly one stage."""
        last = self.pp - 1
        owned = {}
        for parameter in parameter_table(model):
            if parameter.layer is None:
                here = pp_rank == (0 if parameter.name.startswith("embedding.") else last)
            else:
                here = any(parameter.layer in layers for layers in self.stages[pp_rank])
            if here:
                owned[parameter.name] = parameter
        return owned

    def held(self, model: ModelConfig, pp_rank: int) -> dict[str, Parameter]:
        """`owned` and, on the last of several stages, the copy of a tied embedding: all that a stage must load."""
        held = self.owned(model, pp_rank)
        if 0 < pp_rank == self.pp - 1 and not model.untie_embeddings_and_output_weights:
            held[TIED_OUTPUT.megatron] = make_parameter(TIED_OUTPUT, model)
        return held
