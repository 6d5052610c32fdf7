"""The critic in Megatron-core: a model of the actor's kind with values in place of logits, or a head on the actor."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import WEIGHTS
from mindspeed_rl.checkpoint.tensors import StoredTensors
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.megatron.engine import MegatronEngine
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
        super().__init__(cfg, model, device, total_steps, weights, with_reference=False)

    def _trained(self, model: ModelConfig) -> ModelConfig:
        return model.as_critic()

    @property
    def exported(self) -> ModelConfig:
        """The critic itself."""
        return self._trained(self.backbone)

    def _load(self, parameters: dict[str, torch.nn.Parameter], weights: HFWeights | StoredTensors) -> None:
        if isinstance(weights, StoredTensors) and weights.names(self.state_prefix + WEIGHTS):
            read_pieces(Sharding(self.model_config, self.layout, parameters, self.state_prefix), weights)
            return
        if isinstance(weights, HFWeights) and VALUE_HEAD_NAME in weights.names:
            self._fill(parameters, weights, self.exported)
            return
        head = parameters.pop(VALUE_HEAD.megatron, None)
        if head is not None:
            head.data.zero_()
        self._fill(parameters, weights, self.backbone)


class ActorCriticEngine(MegatronEngine):
    """The actor with the critic on its layers: a value head takes the hidden states that the output layer takes.

    A pass gives values beside log-probs, and one optimizer steps on all of it. The head is no part of the language
    model: rollout and Hugging Face folders do not have it, and in checkpoints it has a place of its own. It starts
    from that of the checkpoint that the actor starts from, if there is one, else from 0.
    """

    HEAD = "value_head."

    def _trained(self, model: ModelConfig) -> ModelConfig:
        return model.with_value_head()

    def _load(self, parameters: dict[str, torch.nn.Parameter], weights: HFWeights | StoredTensors) -> None:
        head = parameters.pop(VALUE_HEAD.megatron, None)  # neither other stages nor the reference have one
        self._fill(parameters, weights, self.backbone)
        if head is None:
            return
        if isinstance(weights, StoredTensors) and weights.names(self.HEAD + WEIGHTS):
            read_pieces(self._sharding({VALUE_HEAD.megatron: head}, self.HEAD), weights)
        else:
            head.data.zero_()

    def _sharding(self, parameters: Mapping[str, torch.nn.Parameter], role: str) -> Sharding:
        return Sharding(self.model_config, self.layout, parameters, role)

    def _shardings(self) -> list[Sharding]:
        body = self._trained_parameters()
        head = {name: body.pop(name) for name in (VALUE_HEAD.megatron,) if name in body}
        return [self._sharding(body, self._trained_prefix), self._sharding(head, self.HEAD)]
