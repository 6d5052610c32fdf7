"""The reward model's role of a rank that trains: scores of responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.config.model import CriticModel
from mindspeed_rl.data.reward_inputs import RewardInputs
from mindspeed_rl.data.tokenizer import actor_tokenizer
from mindspeed_rl.workers.context import Context, Source

if TYPE_CHECKING:
    from mindspeed_rl.engine.base import Partition, RewardEngine


class RewardModel:
    """Frozen, on the actor's layout. Megatron's process groups are there already.

    Args:
        context: this rank's place in the run.
        source: where the actor comes from, whose tokens are scored.
    """

    def __init__(self, context: Context, source: Source):
        from mindspeed_rl.engine.megatron.reward_model import RewardModelEngine

        config = context.config
        assert config.reward_config.load is not None, "asked for only where there is one"
        weights = HFWeights(config.reward_config.load)
        shape = CriticModel.from_hf(weights.config())
        self.engine: RewardEngine = RewardModelEngine(config.reward_model, shape, context.device, weights)
        self.inputs = RewardInputs(config, actor_tokenizer(config, source.hf_folder))

    def scores(
        self, columns: Mapping[str, Sequence[Any]], passes: Callable[[Sequence[int]], Partition]
    ) -> torch.Tensor | None:
        """Of samples, [B] float32 on the host; NaN: too long, or not finite. None off the output rank.

        Args:
            columns: `prompt_ids`, `responses` and `sample` of each.
            passes: from the tokens of each sequence, that nobody looks at included, to the sequences of each pass.
        """
        sequences, fits = self.inputs(columns["prompt_ids"], columns["responses"], columns["sample"])
        found = self.engine.rewards(sequences, passes([len(sequence) + 1 for sequence in sequences]))
        if found is None:
            return None
        return found.masked_fill(~(torch.isfinite(found) & torch.tensor(fits)), torch.nan)
