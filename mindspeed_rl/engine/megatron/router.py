"""Routing of DeepSeek-V2 and V3: experts from some groups only, with a bias for the choice."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter


class GroupedRouter(TopKRouter):
    """Megatron's router with the choice of transformers and vLLM.

    Megatron adds up the best (experts a token / groups a token) scores of a group; DeepSeek-V2 takes the best one,
    and V3 adds up two, whatever the numbers.

    V3's bias balances the use of experts in pretraining, where it moves after every step by how many tokens an expert
    got. It has no gradient, and in RL it stays as it is: whatever moved it would change the policy apart from the
    loss. So it is a parameter that nothing trains, and travels like all others.
    """

    def routing(self, logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, experts] of a token's experts, 0 for the others, and which those are."""
        config = self.config
        logits = logits.flatten(0, -2)
        scores = logits.sigmoid() if self.score_function == "sigmoid" else logits.softmax(-1)
        with torch.no_grad():
            chosen = self._choose(scores if self.expert_bias is None else scores + self.expert_bias)
        weights = scores.gather(1, chosen)
        if not config.moe_router_pre_softmax:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * config.moe_router_topk_scaling_factor
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        return torch.zeros_like(scores).scatter(1, chosen, weights), is_chosen

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """[T, k]: the experts with the largest scores in the best groups."""
        groups = self.config.moe_router_num_groups
        if groups is not None:
            best = scores.unflatten(1, (groups, -1)).topk(1 if self.expert_bias is None else 2).values.sum(-1)
            kept = best.topk(self.config.moe_router_group_topk).indices
            is_out = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
            scores = scores.masked_fill(is_out.repeat_interleave(scores.shape[1] // groups, 1), float("-inf"))
        return scores.topk(self.topk).indices


def use_grouped_routers(model: torch.nn.Module, has_bias: bool) -> None:
    """Make all routers of a built model such ones: only newer Megatron-core has a place for them in layer specs."""
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router.__class__ = GroupedRouter
            if has_bias:
                zeros = torch.zeros(router.num_experts, dtype=torch.float32, device=router.weight.device)
                router.expert_bias = torch.nn.Parameter(zeros, requires_grad=False)
