"""Megatron's optimizer and learning-rate schedule, with a state that resumes exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.schema import MegatronConfig


class Optimizer:
    """AdamW over the actor's parameters.

    Args:
        cfg: the actor's configuration.
        model: the wrapped chunks of the model whose gradients are stepped on.
        total_steps: optimizer steps of the whole run; warm-up and decay are shares of it.
    """

    def __init__(self, cfg: MegatronConfig, model: Sequence[DistributedDataParallel], total_steps: int):
        self.model = list(model)
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=cfg.lr,
                min_lr=cfg.min_lr,
                weight_decay=cfg.weight_decay,
                adam_beta1=cfg.adam_beta1,
                adam_beta2=cfg.adam_beta2,
                adam_eps=cfg.adam_eps,
                clip_grad=cfg.clip_grad,
                bf16=cfg.bf16,
                params_dtype=torch.bfloat16 if cfg.bf16 else torch.float32,
                use_distributed_optimizer=cfg.use_distributed_optimizer,
                overlap_param_gather=cfg.overlap_param_gather,
            ),
            self.model,
        )
        warmup_steps = int(cfg.lr_warmup_fraction * total_steps)
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=cfg.lr,
            min_lr=cfg.min_lr,
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=max(total_steps, warmup_steps + 1),
            lr_decay_style=cfg.lr_decay_style,
            start_wd=cfg.weight_decay,
            end_wd=cfg.weight_decay,
            wd_incr_steps=total_steps,
            wd_incr_style="constant",
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> tuple[float, float]:
        """Clip and step; returns the global gradient norm before clipping and the learning rate that was used."""
        learning_rate = self.megatron.param_groups[0]["lr"]
        _, grad_norm, _ = self.megatron.step()
        self.scheduler.step(increment=1)
        return float(grad_norm or 0.0), float(learning_rate)

    def reload_weights(self) -> None:
        """Take the model's weights, changed from outside, as the new main weights."""
        self.megatron.reload_model_params()

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        chain = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [member.optimizer for member in chain]

    def _parameters(self) -> list[tuple[torch.optim.Optimizer, torch.Tensor]]:
        return [
            (optimizer, parameter)
            for optimizer in self._torch_optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Everything the optimizer keeps beside the model: moments, and main weights where they are copies."""
        model_storages = {p.untyped_storage().data_ptr() for chunk in self.model for p in chunk.parameters()}
        kept: list[torch.Tensor] = []
        for optimizer, parameter in self._parameters():
            state = optimizer.state.get(parameter, {}).values()
            kept += [tensor for tensor in state if isinstance(tensor, torch.Tensor) and tensor.dim() > 0]
            if parameter.untyped_storage().data_ptr() not in model_storages:
                kept.append(parameter)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """Main weights and moments of this rank's shard, in the optimizer's order, and the schedule's position."""
        shards = []
        for optimizer, parameter in self._parameters():
            state = optimizer.state.get(parameter, {})
            # copies: a shard is a view, and saving a view would save the whole buffer behind it
            moments = {name: torch.as_tensor(value).detach().to("cpu", copy=True) for name, value in state.items()}
            shards.append({"main": parameter.detach().to("cpu", copy=True), "state": moments})
        return {"shards": shards, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: the state belongs to another layout or model.
        """
        parameters = self._parameters()
        found = [tuple(shard["main"].shape) for shard in state["shards"]]
        expected = [tuple(parameter.shape) for _, parameter in parameters]
        if found != expected:
            raise CheckpointError(
                f"optimizer state has {len(found)} shards of shapes {found[:3]}…, this layout needs {len(expected)} "
                f"of {expected[:3]}…: resume with the layout that saved it, or set no_load_optim"
            )
        with torch.no_grad():
            for (optimizer, parameter), shard in zip(parameters, state["shards"], strict=True):
                parameter.copy_(shard["main"])
                optimizer.state[parameter] = {
                    # torch keeps "step" on the host
                    name: value.clone() if value.dim() == 0 else value.to(parameter.device)
                    for name, value in shard["state"].items()
                }
        self.scheduler.load_state_dict(state["scheduler"])
