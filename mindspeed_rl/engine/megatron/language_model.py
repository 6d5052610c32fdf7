"""Megatron's GPT model, whose last chunk gives hidden states: heads make outputs of those tokens that need them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):
    """A linear layer to one value, in float32, whole on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n]."""
        return F.linear(hidden.float(), self.weight.float())[:, 0]


class LanguageModel(GPTModel):
    """A chunk of the model. Prompts need no outputs, and logits are the largest thing that there is."""

    post_process: bool
    output_layer: Any  # of the last chunk; None: it has no logits
    value_head: ValueHead | None

    def prepare_heads(self, has_output_layer: bool, has_value_head: bool) -> None:
        """Of the last chunk, after it was built."""
        if not has_output_layer:
            self.output_layer = None
        elif self.output_layer.weight is not None:  # else it is the embedding's
            # to be called for its weights: Megatron's overlapped gathering waits for them in a hook of the call
            self.output_layer.forward = lambda: self.output_layer.weight
        self.value_head = ValueHead(self.config) if has_value_head else None

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """What the next chunk takes or, of the last one, final hidden states [T/cp, hidden]."""
        if not self.post_process:
            return super().forward(*inputs, **named)
        self.post_process = False  # Megatron then ends before its output layer
        try:
            hidden = super().forward(*inputs, **named)
        finally:
            self.post_process = True
        if self.config.sequence_parallel:
            # heads compute the whole gradient on every tensor-parallel rank: each takes its part
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:, 0]

    @property
    def output_weight(self) -> torch.Tensor:
        """[V/tp, hidden] of the output layer, this tensor-parallel rank's part of the padded vocabulary."""
        if self.output_layer.weight is None:
            return self.embedding.word_embeddings.weight
        weight: torch.Tensor = self.output_layer()
        return weight

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n] float32."""
        assert self.value_head is not None, "this model has no value head"
        values: torch.Tensor = self.value_head(hidden)
        return values

    def nothing(self, hidden: torch.Tensor) -> torch.Tensor:
        """0, whose gradient of 0 reaches every parameter."""
        outputs = []
        if self.output_layer is not None:
            outputs.append(F.linear(hidden, self.output_weight))
        if self.value_head is not None:
            outputs.append(self.values(hidden))
        return 0.0 * torch.stack([output.sum() for output in outputs]).sum()
