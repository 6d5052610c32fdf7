"""The parallel layout, batch arithmetic and stages that follow from a configuration. No process groups.

Ranks are numbered as Megatron-core does by default: tensor parallel fastest, then context, data, pipeline parallel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from mindspeed_rl.config.algorithm import COV_LOSSES, FULL_KL
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.config.schema import Config, MegatronConfig
from mindspeed_rl.config.supervised import RESPONSES

Chunks = tuple[tuple[range, ...], ...]
"""Layers (indices in the whole model) of each pipeline stage's model chunks; one chunk without interleaving."""


def pipeline_chunks(num_layers: int, actor: MegatronConfig) -> Chunks:
    """The pipeline stages of a configuration that has passed the rules.

    Without `num_layer_list` the layers, and the empty positions `noop_layers` between them, are divided evenly: the
    c-th chunk of stage s has the (c * PP + s)-th part of them.
    """
    pp = actor.pipeline_model_parallel_size
    if actor.num_layer_list is not None:
        ends = list(accumulate(actor.num_layer_list))
        return tuple((range(end - count, end),) for end, count in zip(ends, actor.num_layer_list, strict=True))
    empty = actor.noop_layers or ()
    positions = num_layers + len(empty)
    per_chunk = actor.num_layers_per_virtual_pipeline_stage or positions // pp

    def layers_before(position: int) -> int:
        return position - sum(noop < position for noop in empty)

    def chunk(number: int) -> range:
        return range(layers_before(number * per_chunk), layers_before((number + 1) * per_chunk))

    chunks = positions // (pp * per_chunk)
    return tuple(tuple(chunk(c * pp + stage) for c in range(chunks)) for stage in range(pp))


@dataclass(frozen=True)
class Layout:
    """Sizes of all parallel groups, and one iteration's way from prompts to micro-batches."""

    world: int  # ranks that train, a device each
    tp: int
    cp: int
    pp: int
    dp: int
    infer_tp: int
    rollout_replicas: int  # vLLM engines
    prompts_per_iteration: int
    prompts_in_generation: int  # more than those with partial rollout
    samples_per_prompt: int
    prompts_per_mini_batch: int
    micro_batch_size: int  # sequences per rank and forward-backward pass
    epochs: int  # passes over an iteration's samples
    train_iters: int
    integrated: bool = True  # the same devices train and generate
    ep: int = 1  # neighbours, of the DP x CP ranks that hold the same weights otherwise, that share the experts

    @property
    def rollout_world(self) -> int:
        """Ranks that generate; they are those that train, or ranks of a world of their own."""
        return self.rollout_replicas * self.infer_tp

    @property
    def devices(self) -> int:
        """All devices of the run."""
        return self.world if self.integrated else self.world + self.rollout_world

    @property
    def sequences_per_iteration(self) -> int:
        """Sequences of one iteration, all ranks together."""
        return self.prompts_per_iteration * self.samples_per_prompt

    @property
    def rows_in_generation(self) -> int:
        """Sequences that an iteration generates, those that it carries over included."""
        return self.prompts_in_generation * self.samples_per_prompt

    @property
    def mini_batches(self) -> int:
        """Mini-batches of one pass over an iteration's prompts."""
        return self.prompts_per_iteration // self.prompts_per_mini_batch

    @property
    def optimizer_steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        return self.mini_batches * self.epochs

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: the length of the learning-rate schedule."""
        return self.optimizer_steps_per_iteration * self.train_iters

    @property
    def sequences_per_mini_batch_per_rank(self) -> int:
        """Sequences of one mini-batch on one data-parallel rank."""
        return self.prompts_per_mini_batch * self.samples_per_prompt // self.dp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one mini-batch on one rank; the last one may be smaller."""
        return -(-self.sequences_per_mini_batch_per_rank // self.micro_batch_size)

    def tp_rank(self, rank: int) -> int:
        """Position of `rank` in its tensor-parallel group."""
        return rank % self.tp

    def cp_rank(self, rank: int) -> int:
        """Position of `rank` among those that share the tokens of a micro-batch."""
        return rank // self.tp % self.cp

    def dp_rank(self, rank: int) -> int:
        """Position of `rank` in its data-parallel group."""
        return rank // (self.tp * self.cp) % self.dp

    def ep_rank(self, rank: int) -> int:
        """Position of `rank` in its expert-parallel group."""
        return self._expert_group(rank)[1]

    def _expert_group(self, rank: int) -> tuple[int, int]:
        """Which of the groups that share the experts of a layer `rank` is in, and its position there."""
        return divmod(rank // self.tp % (self.cp * self.dp), self.ep)

    def pp_rank(self, rank: int) -> int:
        """Pipeline stage of `rank`."""
        return rank // (self.tp * self.cp * self.dp)

    def rollout_replica(self, rank: int) -> int:
        """The vLLM engine that rollout rank `rank` belongs to; the ranks of one engine are neighbours."""
        return rank // self.infer_tp

    def rollout_tp_rank(self, rank: int) -> int:
        """Position of `rank` in its vLLM engine."""
        return rank % self.infer_tp

    def rollout_engines(self) -> list[tuple[int, ...]]:
        """The ranks of each vLLM engine."""
        firsts = range(0, self.rollout_world, self.infer_tp)
        return [tuple(range(first, first + self.infer_tp)) for first in firsts]

    def model_replicas(self) -> list[tuple[int, ...]]:
        """The ranks of each model replica, by data-parallel rank: TP x CP x PP ranks that work on the same samples.

        Within a replica the ranks ascend: stage by stage, and by context-, then tensor-parallel rank within a stage.
        Of experts each holds a 1/EP, the others being with its neighbours.
        """
        replicas: list[list[int]] = [[] for _ in range(self.dp)]
        for rank in range(self.world):
            replicas[self.dp_rank(rank)].append(rank)
        return [tuple(replica) for replica in replicas]

    def cells(self) -> list[tuple[int, ...]]:
        """The finest partition of the ranks that divides no model replica, expert-parallel group or vLLM engine.

        Within a cell the training weights are complete as often as there are replicas, so that every engine of the
        cell can be filled without leaving it. Cells are sorted, and so are the ranks in each.
        Only for integrated workers: elsewhere no rank is of both kinds.
        """
        assert self.integrated
        parent = list(range(self.world))

        def root(rank: int) -> int:
            while parent[rank] != rank:
                rank = parent[rank]
            return rank

        # ranks of an expert-parallel group exchange tokens, so their model replicas belong together
        for group_of in (self.dp_rank, lambda rank: self._expert_group(rank)[0], self.rollout_replica):
            first: dict[int, int] = {}
            for rank in range(self.world):
                parent[root(rank)] = root(first.setdefault(group_of(rank), rank))
        cells: dict[int, list[int]] = {}
        for rank in range(self.world):
            cells.setdefault(root(rank), []).append(rank)
        return sorted(tuple(cell) for cell in cells.values())


def model_parallel(cfg: Config) -> tuple[int, int, int]:
    """TP, CP and PP: a model replica has as many devices as their product."""
    actor = cfg.actor
    return actor.tensor_model_parallel_size, actor.context_parallel_size, actor.pipeline_model_parallel_size


def derive_layout(cfg: Config) -> Layout:
    """Layout of a configuration that has passed `rules.check`, whose divisions come out even.

    Where responses are given, a row of the data set counts as a prompt, and an iteration is an optimizer step.
    """
    actor, rl = cfg.actor, cfg.rl_config
    given = RESPONSES.get(actor.stage)
    world, infer_tp = rl.actor_resource.num_npus, cfg.generate_config.infer_tensor_parallel_size
    rollout = rl.actor_resource if rl.rollout_resource is None else rl.rollout_resource
    return Layout(
        world=world,
        tp=actor.tensor_model_parallel_size,
        cp=actor.context_parallel_size,
        pp=actor.pipeline_model_parallel_size,
        dp=world // math.prod(model_parallel(cfg)),
        infer_tp=infer_tp,
        rollout_replicas=rollout.num_npus // infer_tp,
        prompts_per_iteration=actor.global_batch_size,
        prompts_in_generation=prompts_in_generation(cfg),
        samples_per_prompt=given or rl.n_samples_per_prompt,
        prompts_per_mini_batch=actor.global_batch_size if given else rl.mini_batch_size,
        micro_batch_size=actor.micro_batch_size,
        epochs=rl.epochs,
        train_iters=actor.train_iters,
        integrated=rl.use_integrated_worker,
        ep=actor.expert_model_parallel_size,
    )


def prompts_in_generation(cfg: Config) -> int:
    """Prompts of an iteration, with partial rollout those included that it will not train on.

    The threshold is taken as the decimal number that was written: 57 / 0.57 is 100, in floating point a little more.
    """
    rl, batch = cfg.rl_config, cfg.actor.global_batch_size
    return (
        batch
        if rl.partial_rollout_max_split == 1
        else math.ceil(Fraction(batch) / Fraction(str(rl.partial_rollout_threshold)))
    )


def uses_critic(cfg: Config) -> bool:
    """True if advantages need values."""
    return cfg.rl_config.adv_estimator == "gae"


def uses_greedy_baseline(cfg: Config) -> bool:
    """True if advantages need the reward of a greedy response to each prompt."""
    return cfg.rl_config.adv_estimator == "remax"


def shares_critic(cfg: Config) -> bool:
    """True if values come from the actor's own layers, and there is no model of the critic's."""
    return uses_critic(cfg) and cfg.rl_config.critic_shares_actor


def has_critic_model(cfg: Config) -> bool:
    """True if values come from a model of their own."""
    return uses_critic(cfg) and not cfg.rl_config.critic_shares_actor


def uses_full_kl(cfg: Config) -> bool:
    """True if the update computes the KL to the reference over the whole vocabulary, and needs that model for it."""
    return cfg.rl_config.kl_penalty == FULL_KL and cfg.rl_config.init_kl_coef > 0


def tokens_may_be_stale(cfg: Config) -> bool:
    """True if tokens may be of an older policy than the one that is trained on them."""
    rl = cfg.rl_config
    return rl.staleness > 0 or rl.partial_rollout_max_split > 1 or rl.filter_groups_enable


def updates_differ_from_samples(cfg: Config) -> bool:
    """True if an update may start from another policy than the one whose log-probs ratios are taken to."""
    rl = cfg.rl_config
    several = rl.epochs > 1 or rl.mini_batch_size < cfg.actor.global_batch_size
    return several or tokens_may_be_stale(cfg) or not rl.recompute_logprobs


def uses_reward_model(cfg: Config) -> bool:
    """True if a model scores responses."""
    return bool(cfg.reward_config.load)


def scorers(cfg: Config) -> list[str]:
    """What scores responses: verifiers, and the reward model."""
    verifiers = cfg.rl_config.verifier_function if cfg.rl_config.rule_reward else []
    return [*verifiers, *([REWARD_MODEL] if uses_reward_model(cfg) else [])]


def in_place_of_actor(cfg: Config) -> Config:
    """With the reward model where others look for the actor: its layers are divided otherwise."""
    changed = cfg.model_copy()
    changed.__dict__["actor"] = cfg.reward_model  # what is derived from two sections, and cached
    return changed


def uses_reference(cfg: Config) -> bool:
    """True if some term needs the reference model."""
    return cfg.actor.stage == "dpo" if cfg.is_supervised else cfg.rl_config.init_kl_coef > 0


def has_reference_model(cfg: Config) -> bool:
    """True if it takes memory of its own; with adapters (LoRA) it is the actor without them."""
    return uses_reference(cfg) and not cfg.actor.lora_r


def uses_reference_log_probs(cfg: Config) -> bool:
    """True if its log-probs are needed; for the KL over the vocabulary the update runs the model itself."""
    return uses_reference(cfg) and not uses_full_kl(cfg)


def uses_old_log_probs(cfg: Config) -> bool:
    """Whether they are computed in a pass of their own.

    Not if every update starts from the policy that generated, as the training pass yields the same values then, nor
    if those of rollout are taken instead.
    """
    rl = cfg.rl_config
    if not rl.recompute_logprobs or cfg.is_supervised:
        return False
    needed_before = rl.use_kl_in_reward or rl.loss_type in COV_LOSSES
    return needed_before or updates_differ_from_samples(cfg)


def scored_stages(cfg: Config) -> tuple[str, ...]:
    """Passes without gradients that an iteration needs, in their order."""
    needed = {
        REWARD_MODEL: uses_reward_model(cfg),  # first: rewards wait for it
        "reference": uses_reference_log_probs(cfg),
        "value": has_critic_model(cfg),
        "old_log_prob": uses_old_log_probs(cfg) or shares_critic(cfg),  # last: the update needs the actor, too
    }
    return tuple(stage for stage, is_needed in needed.items() if is_needed)


def scores_before_rewards(cfg: Config) -> bool:
    """Whether the reward model has a call of its own, as rewards are waited for before log-probs are asked for."""
    return uses_reward_model(cfg) and (cfg.rl_config.blocking or cfg.rl_config.filter_groups_enable)


def stages_beside_rewards(cfg: Config) -> tuple[str, ...]:
    """Those of `scored_stages` that one call works off, the reward model's among them unless that has its own."""
    apart = REWARD_MODEL if scores_before_rewards(cfg) else None
    return tuple(stage for stage in scored_stages(cfg) if stage != apart)


def scores_while_generating(cfg: Config) -> bool:
    """Whether integrated workers compute log-probs of what is complete while other responses are being generated.

    With filtered groups it is seldom known before the last of them which are trained on.
    """
    return not cfg.rl_config.blocking and not cfg.rl_config.filter_groups_enable


def stages_beside_rollout(cfg: Config, layout: Layout) -> tuple[str, ...]:
    """Those of `scored_stages` that run between two steps of rollout: nothing has to be moved for them."""
    generate = cfg.generate_config
    if not (layout.integrated and scores_while_generating(cfg)):
        return ()
    if layout.ep > 1:  # scoring is a pass of all ranks that share experts: none can take what it finds ready
        return ()
    away = {
        REWARD_MODEL: generate.offload_reward_model,
        "reference": generate.offload_train_param if cfg.actor.lora_r else generate.offload_reference,
        # a first pass that gathers new weights is one of all ranks: none may begin it while others generate
        "value": generate.offload_train_param or cfg.actor.overlap_param_gather,
        "old_log_prob": generate.offload_train_param,
    }
    return tuple(stage for stage in scored_stages(cfg) if not away[stage])
