"""A reward model in Megatron-core: Hugging Face's sequence classification with one label, on the actor's layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.config.model import CriticModel
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.base import Partition, TokenOutputs
from mindspeed_rl.engine.megatron.language_model import LanguageModel
from mindspeed_rl.engine.megatron.model import build_model
from mindspeed_rl.engine.megatron.offload import HostMemory
from mindspeed_rl.engine.megatron.packing import PackedMicroBatch
from mindspeed_rl.engine.megatron.scoring import ScoringEngine
from mindspeed_rl.types import RolloutBatch

_ANY = torch.zeros(1, dtype=torch.int64)  # a token that nothing looks at: values are of what is before a token


class RewardModelEngine(ScoringEngine):
    """See `mindspeed_rl.engine.base.RewardEngine`. Neither gradients nor an optimizer take memory.

    Args:
        cfg: layout and precision.
        model: shape of the model, which need not be the actor's.
        device: this process's device.
        weights: those of the model, with `score.weight`.

    Raises:
        CheckpointError: a weight is missing, or has another shape.
    """

    def __init__(self, cfg: MegatronConfig, model: CriticModel, device: Device, weights: HFWeights):
        super().__init__(cfg, model, device)
        self.chunks = [chunk.requires_grad_(False) for chunk in build_model(cfg, model, device, self.layout)]
        self._fill(self._parameters_of(self.chunks), weights, model)
        self._away = HostMemory(device, "frozen")

    def rewards(self, sequences: Sequence[torch.Tensor], micro_batches: Partition) -> torch.Tensor | None:
        """Of sequences, B x [length] int64, the value of each one's last token; None off the output rank."""
        batch = RolloutBatch(list(sequences), [_ANY] * len(sequences))
        found = self._outputs_of(self.chunks, batch, micro_batches, self._values)
        return None if found is None else found.values

    def _values(self, micro: PackedMicroBatch, model: LanguageModel, hidden: torch.Tensor) -> TokenOutputs:
        return TokenOutputs(values=self._of_all_tokens(micro, model.values(hidden)))

    def offload(self) -> None:
        """Move the weights off the device; a no-op if they are away."""
        if not self._away.is_away:
            self._away.offload(parameter for chunk in self.chunks for parameter in chunk.parameters())

    def onload(self) -> None:
        """Bring them back; a no-op if they are not away."""
        self._away.onload()
        self._away.ready()
