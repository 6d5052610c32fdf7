"""How a model's parameters are spread over ranks: tensor parallelism, pipeline stages, replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.names import TIED_OUTPUT, Parameter, local_name, make_parameter, parameter_table


@dataclass(frozen=True)
class Layout:
    """Ranks are numbered as Megatron does: tensor parallel fastest, then replicas (context, data), then pipeline."""

    tensor_parallel: int
    stages: tuple[range, ...]  # global layer indices of each pipeline stage
    replicas: int = 1  # context parallel x data parallel size: ranks that hold the same weights

    @classmethod
    def even(
        cls, model: ModelConfig, tensor_parallel: int = 1, pipeline_parallel: int = 1, replicas: int = 1
    ) -> Layout:
        """The same number of layers on every stage.

        Raises:
            CheckpointError: the layers cannot be divided evenly.
        """
        if model.num_layers % pipeline_parallel:
            raise CheckpointError(
                f"{model.num_layers} layers cannot be divided evenly over {pipeline_parallel} pipeline stages"
            )
        count = model.num_layers // pipeline_parallel
        stages = tuple(range(stage * count, (stage + 1) * count) for stage in range(pipeline_parallel))
        return cls(tensor_parallel, stages, replicas)

    @property
    def pipeline_parallel(self) -> int:
        return len(self.stages)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.replicas * self.pipeline_parallel

    def rank(self, tp_rank: int, pp_rank: int, replica: int = 0) -> int:
        """Global rank of a place in the layout."""
        return tp_rank + self.tensor_parallel * (replica + self.replicas * pp_rank)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp_rank, pp_rank, replica) of a global rank."""
        rest, tp_rank = divmod(rank, self.tensor_parallel)
        pp_rank, replica = divmod(rest, self.replicas)
        return tp_rank, pp_rank, replica

    def owned(self, model: ModelConfig, pp_rank: int) -> dict[str, Parameter]:
        """Parameters of a stage by their name on it, each parameter of the model on exactly one stage."""
        layers, last = self.stages[pp_rank], self.pipeline_parallel - 1
        owned = {}
        for parameter in parameter_table(model):
            if parameter.layer is None:
                here = pp_rank == (0 if parameter.name.startswith("embedding.") else last)
            else:
                here = parameter.layer in layers
            if here:
                owned[local_name(parameter.name, layers.start)] = parameter
        return owned

    def held(self, model: ModelConfig, pp_rank: int) -> dict[str, Parameter]:
        """`owned` and, on the last of several stages, the copy of a tied embedding: all that a stage must load."""
        held = self.owned(model, pp_rank)
        if 0 < pp_rank == self.pipeline_parallel - 1 and not model.untie_embeddings_and_output_weights:
            held[TIED_OUTPUT.megatron] = make_parameter(TIED_OUTPUT, model)
        return held

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` is the inverse."""
        return {
            "world_size": self.world_size,
            "tensor_parallel": self.tensor_parallel,
            "replicas": self.replicas,
            "pipeline_layers": [[layers.start, layers.stop] for layers in self.stages],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        stages = tuple(range(start, stop) for start, stop in values["pipeline_layers"])
        return cls(values["tensor_parallel"], stages, values["replicas"])
