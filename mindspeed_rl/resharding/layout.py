"""How a model's parameters are spread over ranks: tensor parallelism, pipeline stages, experts, replicas; rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.config.layout import Chunks, pipeline_chunks
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.resharding.names import Parameter, make_parameter, parameter_table
from mindspeed_rl.resharding.tables import TIED_OUTPUT


@dataclass(frozen=True)
class WeightLayout:
    """Ranks are numbered as Megatron does: tensor parallel fastest, then data, then pipeline parallel."""

    tp: int
    stages: Chunks
    dp: int = 1  # replicas: ranks that hold the same weights, but for experts
    ep: int = 1  # neighbouring replicas that share the experts: each holds a contiguous 1/ep of them

    @classmethod
    def even(cls, model: ModelConfig, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> WeightLayout:
        """The same number of layers on every stage, in one chunk, and of experts on every expert-parallel rank.

        Raises:
            CheckpointError: the layers or experts cannot be divided evenly.
        """
        experts = model.num_moe_experts or 1
        if experts % ep or dp % ep:
            raise CheckpointError(f"{experts} experts cannot be divided evenly over {ep} of {dp} replicas")
        if model.num_layers % pp:
            raise CheckpointError(f"{model.num_layers} layers cannot be divided evenly over {pp} pipeline stages")
        return cls(tp, pipeline_chunks(model.num_layers, MegatronConfig(pipeline_model_parallel_size=pp)), dp, ep)

    @classmethod
    def configured(cls, cfg: MegatronConfig, model: ModelConfig, replicas: int) -> WeightLayout:
        """The layout of an actor's configuration that has passed the rules; `replicas`: ranks / (TP x PP)."""
        stages = pipeline_chunks(model.num_layers, cfg)
        return cls(cfg.tensor_model_parallel_size, stages, replicas, cfg.expert_model_parallel_size)

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

    def expert_rank(self, replica: int) -> int:
        """Position of a replica among those that share the experts."""
        return replica % self.ep

    def experts(self, model: ModelConfig, ep_rank: int) -> range:
        """The experts, of each layer that has any, that an expert-parallel rank holds."""
        count = (model.num_moe_experts or 0) // self.ep
        return range(ep_rank * count, (ep_rank + 1) * count)

    def owned(self, model: ModelConfig, pp_rank: int, ep_rank: int = 0) -> dict[str, Parameter]:
        """Parameters of a stage by name, each parameter of the model on exactly one stage.

        Of its experts, those of one expert-parallel rank: as many, in the same order, on every such rank.
        """
        last, experts = self.pp - 1, self.experts(model, ep_rank)
        owned = {}
        for parameter in parameter_table(model):
            if parameter.layer is None:
                here = pp_rank == (0 if parameter.name.startswith("embedding.") else last)
            else:
                here = any(parameter.layer in layers for layers in self.stages[pp_rank])
                here = here and (parameter.expert is None or parameter.expert in experts)
            if here:
                owned[parameter.name] = parameter
        return owned

    def held(self, model: ModelConfig, pp_rank: int, ep_rank: int = 0) -> dict[str, Parameter]:
        """`owned` and, on the last of several stages, the copy of a tied embedding: all that a stage must load."""
        held = self.owned(model, pp_rank, ep_rank)
        if 0 < pp_rank == self.pp - 1 and not model.untie_embeddings_and_output_weights:
            held[TIED_OUTPUT.megatron] = make_parameter(TIED_OUTPUT, model)
        return held

    def written(self, model: ModelConfig, rank: int) -> dict[str, range]:
        """What a rank writes of the parameters it owns, as indices into its flattened shards.

        All ranks together write every element of the model once. Ranks that hold the same parameters write equally
        many elements of them; those that tensor-parallel ranks do not divide, which are small, the first one writes.
        """
        tp_rank, pp_rank, replica = self.coordinates(rank)
        owned = self.owned(model, pp_rank, self.expert_rank(replica))
        mine = {name: p for name, p in owned.items() if p.tp_dim is not None or tp_rank == 0}
        written: dict[str, range] = {}
        for of_experts in (False, True):
            chosen = {n: p for n, p in mine.items() if (p.expert is not None) == of_experts}
            sizes = [prod(parameter.local_shape(self.tp)) for parameter in chosen.values()]
            sharing = self.ep if of_experts else 1
            ranges = equal_part(sizes, replica // sharing, self.dp // sharing)
            written.update(zip(chosen, ranges, strict=True))
        return written


@dataclass(frozen=True)
class RolloutLayout:
    """What the rollout engine on each of the same ranks takes: full tensors, which it cuts itself; its own experts.

    Neighbouring ranks make an engine. Without expert parallelism every rank takes all experts.
    """

    tp: int = 1
    expert_parallel: bool = False  # each of the `tp` ranks of an engine keeps whole experts

    @classmethod
    def configured(cls, cfg: GenerateConfig) -> RolloutLayout:
        """The layout of a configuration that has passed the rules."""
        return cls(cfg.infer_tensor_parallel_size, cfg.enable_expert_parallel)

    def experts(self, model: ModelConfig, rank: int) -> range:
        """The experts, of each layer that has any, that a rank keeps.

        vLLM's placement `linear`: as evenly as possible, in order, the first ranks having one more.
        """
        count = model.num_moe_experts or 0
        if not self.expert_parallel:
            return range(count)
        share, more = divmod(count, self.tp)
        position = rank % self.tp
        start = position * share + min(position, more)
        return range(start, start + share + (position < more))

    def hf_names(self, model: ModelConfig, rank: int) -> set[str]:
        """The Hugging Face tensors that a rank takes."""
        experts = self.experts(model, rank)
        taken = (p for p in parameter_table(model) if p.expert is None or p.expert in experts)
        return {name for parameter in taken for name in parameter.hf_names}


def equal_part(sizes: Sequence[int], part: int, parts: int) -> list[range]:
    """Of things laid end to end and cut into `parts` equal parts: what of each is in one of them, maybe nothing."""
    total = sum(sizes)
    cuts = total * part // parts, total * (part + 1) // parts
    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [
        range(*(min(max(cut - start, 0), size) for cut in cuts)) for start, size in zip(starts, sizes, strict=True)
    ]
