"""The critic in Megatron-core: the actor's kind of model with one value for each token instead of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import WEIGHTS
from mindspeed_rl.checkpoint.tensors import StoredTensors
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.engine.megatron.engine import MegatronEngine
from mindspeed_rl.engine.megatron.language_model import LanguageModel
from mindspeed_rl.engine.megatron.packing import PackedMicroBatch
from mindspeed_rl.engine.megatron.sharding import Sharding, read_pieces
from mindspeed_rl.resharding.tables import VALUE_HEAD, VALUE_HEAD_NAME


class CriticEngine(MegatronEngine):
    """Values of response tokens, given what is before each, and neither log-probs nor entropies.

    It starts from a critic's weights if they have one: those of a checkpoint, or a folder with `score.weight`, as
    Hugging Face's sequence classification with one label has. Else the body starts from the actor's, the head from 0.
    """

    role = "critic"
    state_prefix = "critic."

    def __init__(
        self,
        cfg: MegatronConfig,
        model: ModelConfig,
        device: Device,
        total_steps: int,
        weights: HFWeights | StoredTensors,
    ):
        self.backbone = model
        super().__init__(cfg, model.as_critic(), device, total_steps, weights, with_reference=False)

    def _load(self, chunks: Sequence[LanguageModel], weights: HFWeights | StoredTensors) -> None:
        parameters = self._parameters_of(chunks)
        if isinstance(weights, StoredTensors) and weights.names(self.state_prefix + WEIGHTS):
            read_pieces(Sharding(self.model_config, self.layout, parameters, self.state_prefix), weights)
            return
        if isinstance(weights, HFWeights) and VALUE_HEAD_NAME in weights.names:
            self._fill(parameters, weights, self.model_config)
            return
        head = parameters.pop(VALUE_HEAD.megatron, None)
        if head is not None:
            head.data.zero_()
        self._fill(parameters, weights, self.backbone)

    def _response_outputs(
        self, micro: PackedMicroBatch, model: LanguageModel, hidden: torch.Tensor, temperature: float, entropy: bool
    ) -> TokenOutputs:
        """Of all response tokens, on every rank of the last stage."""
        return TokenOutputs(values=self._of_all_tokens(micro, model.values(hidden)))
