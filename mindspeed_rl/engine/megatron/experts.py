"""A rank's experts in two grouped matrix products, instead of two for each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import mlp as megatron_mlp
from megatron.core.transformer.moe.experts import SequentialMLP


class _GroupedLinear(torch.autograd.Function):
    """Rows `ends[e - 1]` to `ends[e]` of the input are multiplied with the weight of expert e.

    Weights stay one parameter an expert, as names, gradients and exports know them: they are stacked for the time of
    a product, which costs a copy, little beside the product.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """[T, in], [E] int32 and E times [out, in] -> [T, out]."""
        ctx.save_for_backward(rows, ends, *weights)
        return F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = F.grouped_mm(gradient, torch.stack(weights), offs=ends)
        of_weights = F.grouped_mm(gradient.t(), rows, offs=ends)
        return (of_rows, None, *of_weights)


class GroupedExperts(SequentialMLP):
    """The same parameters and results as Megatron's loop over experts, which launches kernels for each of them."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,  # [T, hidden], the tokens of the first expert first
        tokens_per_expert: torch.Tensor,  # [E], on the host
        permuted_probs: torch.Tensor,  # [T]: weight of the expert's output for its token
    ) -> tuple[torch.Tensor, None]:
        """[T, hidden], and no bias."""
        tokens = permuted_local_hidden_states
        ends = tokens_per_expert.cumsum(0).to(device=tokens.device, dtype=torch.int32)
        hidden = _GroupedLinear.apply(tokens, ends, *(expert.linear_fc1.weight for expert in self.local_experts))
        hidden = self._activate(hidden, permuted_probs[:, None])
        output = _GroupedLinear.apply(hidden, ends, *(expert.linear_fc2.weight for expert in self.local_experts))
        return output, None

    def _activate(self, gate_and_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.config.bias_activation_fusion:
            # looked up there, where a device's kernel may have taken its place
            return megatron_mlp.weighted_bias_swiglu_impl(gate_and_up, None, weights)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return (F.silu(gate) * up * weights).to(gate.dtype)
