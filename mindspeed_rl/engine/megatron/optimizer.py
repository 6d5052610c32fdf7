"""Megatron's optimizer and learning-rate schedule, with a state that resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.engine.megatron.versions import has_parameters, optimizer_arguments, step_with_all_stages

WSD = ("wsd_decay_steps", "lr_wsd_decay_style")  # of the schedule, and not in Megatron's state of it
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch and its fused substitutes name Adam's


@dataclass(frozen=True)
class Shard:
    """What a rank's optimizer keeps for a parameter, or for consecutive elements of it."""

    parameter: torch.nn.Parameter  # of the model
    start: int  # index of the first element in the flattened parameter
    main: torch.Tensor  # the weights that are stepped on
    state: MutableMapping[torch.Tensor, dict[str, Any]]  # of all weights that are stepped together with it
    is_partial: bool  # data-parallel ranks keep different elements, not each the same

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """Tensors shaped like `main`, by name; none before the first step."""
        state = self.state.get(self.main, {})
        return {moment: state[moment] for moment in MOMENTS if moment in state}


class Optimizer:
    """AdamW over the actor's parameters.

    Args:
        cfg: the actor's configuration.
        model: the wrapped chunks of the model whose gradients are stepped on.
        total_steps: optimizer steps of the whole run; warm-up and decay are shares of it.
    """

    def __init__(self, cfg: MegatronConfig, model: Sequence[DistributedDataParallel], total_steps: int):
        self.model = list(model)
        self.keeps_main_weights = cfg.bf16  # in float32, beside the model's; else the model's own are stepped on
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
                **optimizer_arguments(cfg.overlap_param_gather),
            ),
            self.model,
        )
        step_with_all_stages(self.megatron, self.model[0].config.num_moe_experts is not None)
        warmup_steps = int(cfg.lr_warmup_fraction * total_steps)
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=cfg.lr,
            min_lr=cfg.min_lr,
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=max(total_steps, warmup_steps + 1),
            lr_decay_style=cfg.lr_decay_style,
            wsd_decay_steps=max(1, round((cfg.lr_wsd_decay_fraction or 0.0) * total_steps)),
            lr_wsd_decay_style=cfg.lr_wsd_decay_style,
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

    # ---- state ---------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard]:
        """What this rank keeps for the model's parameters, or for the part that data-parallel ranks leave to it."""
        for member in self._members():
            for parameter, main, start in _main_weights(member):
                yield Shard(parameter, start, main, member.optimizer.state, hasattr(member, "gbuf_ranges"))

    def _members(self) -> list[Any]:
        """Megatron has an optimizer for experts and one for all else."""
        members = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [member for member in members if has_parameters(member)]

    def tensors(self) -> list[torch.Tensor]:
        """Everything the optimizer keeps beside the model: moments, and main weights where they are copies."""
        kept: list[torch.Tensor] = []
        for shard in self.shards():
            kept += shard.moments.values()
            if self.keeps_main_weights:
                kept.append(shard.main)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """What is the same on every rank: the schedule's position, and how often Adam has stepped."""
        schedule = {**self.scheduler.state_dict(), **{key: getattr(self.scheduler, key) for key in WSD}}
        return {"scheduler": schedule, "adam_steps": self._adam_steps()}

    def _adam_steps(self) -> int:
        """torch counts for each parameter, fused implementations for each group; what does not count lags behind."""
        of_parameters = [shard.state.get(shard.main, {}) for shard in self.shards()]
        of_groups = [group for member in self._members() for group in member.optimizer.param_groups]
        return max((int(count["step"]) for count in (*of_parameters, *of_groups) if "step" in count), default=0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. If there were steps, `shards` then have moments, to be filled."""
        steps = state["adam_steps"]
        for member in self._members():
            member.optimizer.state.clear()
            for group in member.optimizer.param_groups:
                group["step"] = torch.tensor(steps)  # a tensor, as MindSpeed's AdamW has; others take it as a number
        for shard in self.shards():
            if steps:
                moments = {moment: torch.zeros_like(shard.main) for moment in MOMENTS}
                # torch keeps this on the host
                shard.state[shard.main] = {"step": torch.tensor(float(steps)), **moments}
        for key in WSD:  # first: what follows works out a learning rate
            setattr(self.scheduler, key, state["scheduler"].get(key, getattr(self.scheduler, key)))
        self.scheduler.num_steps = 0  # Megatron adds to it
        self.scheduler.load_state_dict(state["scheduler"])


def _main_weights(member: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """(parameter of the model, what Adam steps on, index of its first element in the flattened parameter).

    Adam steps on the parameter itself, on a float32 copy of it, or on this rank's part of either. `member`: one of
    Megatron's optimizers, of which these attributes are public.
    """
    if hasattr(member, "gbuf_ranges"):  # distributed: the buffers' buckets are cut into equal parts
        for bucket in chain(*(chain(*of_buffer.values()) for of_buffer in member.gbuf_ranges)):
            for parameter, ranges in bucket["param_map"].items():
                group, order = member.model_param_group_index_map[parameter]
                yield parameter, member.optimizer.param_groups[group]["params"][order], ranges["param"].start
    elif hasattr(member, "float16_groups"):
        copies = zip(chain(*member.float16_groups), chain(*member.fp32_from_float16_groups), strict=True)
        for parameter, main in chain(copies, ((p, p) for p in chain(*member.fp32_from_fp32_groups))):
            yield parameter, main, 0
    else:
        for group in member.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, parameter, 0
