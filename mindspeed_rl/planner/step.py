"""How long an iteration takes: a model of its stages, of shapes and rates alone.

What each stage does is that of the trainer: see `trainer.grpo_trainer`. Rates are those of a `Cluster`, whose shares
carry what kernels lose; the rest is counted: FLOPs, bytes of device memory, of links and of the host's memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from mindspeed_rl.config.files import resolve_reward_model
from mindspeed_rl.config.layout import (
    Layout,
    has_reference_model,
    in_place_of_actor,
    pipeline_chunks,
    scored_stages,
)
from mindspeed_rl.config.memory import (
    FLOAT32,
    GIB,
    estimate_memory,
    kv_bytes_per_token,
    most_layers,
    rollout_parameters,
    trained_parameters,
)
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.config.schema import Config
from mindspeed_rl.metrics.throughput import TRAIN_TO_FORWARD
from mindspeed_rl.planner.cluster import GIGA, TERA, Cluster

SIMULATED = 512  # sequences of an engine; of more, each stands for several
# measured on two cores: bytes/s that the dock moves on a node; seconds that its controller takes for
# a row and a claim, that an exported tensor takes however small, and the driver for a call of a worker
DOCK_BYTES, CONTROLLER_ROW, CONTROLLER_CLAIM, TENSOR, CALL = 1.0e9, 0.4e-6, 1.2e-3, 50e-6, 300e-6


@dataclass(frozen=True)
class Work:
    """What a step is made of."""

    prompt: float  # mean tokens of a prompt
    responses: Sequence[int]  # tokens of some responses, that stand for all
    reward_seconds: float = 1e-3  # of a process, for a response

    @property
    def response(self) -> float:
        """Mean tokens of a response."""
        return sum(self.responses) / len(self.responses)

    @property
    def sequences(self) -> list[int]:
        """Prompts and responses together."""
        return [round(self.prompt + response) for response in self.responses]


@dataclass(frozen=True)
class StepTime:
    """Seconds of each stage; `hidden` is what passes while others work."""

    rollout: float
    rewards: float
    scoring: float
    update: float
    resharding: float
    offload: float
    dock: float
    calls: float  # of workers, by the driver
    hidden: float

    @property
    def total(self) -> float:
        """Seconds of an iteration."""
        return sum(getattr(self, field.name) for field in fields(self)) - 2 * self.hidden


def step_time(cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster, work: Work) -> StepTime:
    """Seconds of the stages of an iteration of a valid configuration."""
    rollout = rollout_seconds(cfg, model, layout, cluster, work)
    rewards = rewards_seconds(cfg, layout, work)
    scoring = scoring_seconds(cfg, model, layout, cluster, work)
    update = update_seconds(cfg, model, layout, cluster, work)
    hidden = 0.0 if cfg.rl_config.blocking else min(rewards, rollout + scoring)
    if cfg.rl_config.staleness:  # rollout is of a later iteration, on devices of its own
        hidden += min(rollout, scoring + update)
    return StepTime(
        rollout=rollout,
        rewards=rewards,
        scoring=scoring,
        update=update,
        resharding=resharding_seconds(cfg, model, layout, cluster),
        offload=offload_seconds(cfg, model, layout, cluster),
        dock=dock_seconds(cfg, layout, cluster, work),
        calls=driver_seconds(cfg, layout),
        hidden=hidden,
    )


# ---- rollout -----------------------------------------------------------------------------------------------------


def rollout_seconds(cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster, work: Work) -> float:
    """Of the engine's share: prompts computed, then one token a step of all that run, until the longest is done."""
    share = layout.rows_in_generation / layout.rollout_replicas
    simulated = min(SIMULATED, max(1, round(share)))
    each = share / simulated  # sequences that one of those stands for
    slots = max(1, round(min(cfg.generate_config.max_num_seqs, _cached(cfg, model, layout, work)) / each))
    prompts = share / layout.samples_per_prompt if cfg.generate_config.enable_prefix_caching else share
    prefill = prompts * model.forward_flops([round(work.prompt)])[0] / (layout.infer_tp * cluster.scoring_flops)
    step = _DecodeStep(cfg, model, layout, cluster)
    lengths = [work.responses[index * len(work.responses) // simulated] for index in range(simulated)]
    random.Random(0).shuffle(
        lengths
    )  # nobody knows which will be long: with the longest first, queues would look short
    return prefill + sum(
        steps * step.seconds(running * each, work.prompt + generated)
        for steps, running, generated in _schedule(lengths, slots)
    )


def _cached(cfg: Config, model: ModelConfig, layout: Layout, work: Work) -> float:
    """Sequences of mean length whose keys and values an engine's share of memory holds.

    Any number, if the device's memory is not known.
    """
    generate = cfg.generate_config
    if cfg.device_memory_gib is None:
        return math.inf
    if cfg.device == "cpu":
        left = float(generate.cpu_kv_cache_gib * GIB)
    else:
        width = 2 if generate.dtype != "float32" else FLOAT32
        engine = generate.gpu_memory_utilization * cfg.device_memory_gib * GIB
        left = engine - rollout_parameters(model, layout.infer_tp) * width
    mean = work.prompt + sum(work.responses) / len(work.responses)
    return max(1.0, left / (kv_bytes_per_token(cfg, model) * mean))


def _schedule(lengths: Sequence[int], slots: int) -> list[tuple[int, int, float]]:
    """Stretches of equally many sequences: steps, how many run, mean tokens that these have in the middle.

    A sequence that is done makes room for the next one.
    """
    waiting, running, stretches = list(reversed(lengths)), list[tuple[int, int]](), []  # (length, tokens so far)
    while waiting or running:
        while waiting and len(running) < slots:
            running.append((waiting.pop(), 0))
        steps = min(length - done for length, done in running)
        mean = sum(done for _, done in running) / len(running) + steps / 2
        stretches.append((steps, len(running), mean))
        running = [(length, done + steps) for length, done in running if length > done + steps]
    return stretches


class _DecodeStep:
    """A token of each running sequence: weights and cache are read, tokens multiplied, results added up over TP."""

    def __init__(self, cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster):
        self.model, self.tp, self.cluster = model, layout.infer_tp, cluster
        self.width = 2 if cfg.generate_config.dtype != "float32" else FLOAT32
        self.parameters = rollout_parameters(model, layout.infer_tp)
        self.kv = kv_bytes_per_token(cfg, model)

    def seconds(self, running: float, context: float) -> float:
        """Of `running` sequences with `context` tokens each."""
        model, cluster = self.model, self.cluster
        experts = model.expert_parameters / self.tp
        if model.num_moe_experts:  # those that some token goes to
            unused = (1 - (model.moe_router_topk or 0) / model.num_moe_experts) ** running
            experts *= unused
        else:
            experts = 0.0
        read = (self.parameters - experts) * self.width + running * context * self.kv
        products = 2 * model.matmul_parameters * running / self.tp
        bound = read / (cluster.memory_gb_s * GIGA) + products / (cluster.tflops * TERA)
        return bound / cluster.decode_share + cluster.decode_step_ms / 1e3 + self._exchange(running)

    def _exchange(self, running: float) -> float:
        if self.tp == 1:
            return 0.0
        size = 2 * (self.tp - 1) / self.tp * running * self.model.hidden_size * self.width
        each = self.cluster.latency_us / 1e6 + size / self.cluster.link(self.tp)
        return 2 * self.model.num_layers * each


def rewards_seconds(cfg: Config, layout: Layout, work: Work) -> float:
    """Of all responses, in `verifier_parallel` processes."""
    rl = cfg.rl_config
    return layout.sequences_per_iteration * work.reward_seconds * len(rl.verifiers) / rl.verifier_parallel


# ---- training ----------------------------------------------------------------------------------------------------


def _flops_per_device(cfg: Config, model: ModelConfig, layout: Layout, work: Work) -> float:
    """Of one forward pass over an iteration's sequences, on a device of the largest pipeline stage."""
    mean = sum(model.forward_flops(work.sequences)) / len(work.sequences)
    largest = most_layers(cfg, model) * layout.pp / model.num_layers
    return mean * layout.sequences_per_iteration * largest / layout.world


def _tokens_per_device(layout: Layout, work: Work) -> float:
    """Tokens of an iteration that a device's stage computes."""
    return layout.sequences_per_iteration * (work.prompt + work.response) / (layout.dp * layout.cp)


def _micro_batches(cfg: Config, layout: Layout, work: Work, sequences: int) -> float:
    """Of a mini-batch on a rank."""
    share = layout.sequences_per_mini_batch_per_rank
    cap = cfg.rl_config.max_packing_token_size
    return max(1.0, share * (work.prompt + work.response) / cap if cap else share / sequences)


def _bubble(cfg: Config, model: ModelConfig, layout: Layout, micro_batches: float) -> float:
    """What a pipeline takes, as a multiple of what its stages compute (arXiv:2104.04473, section 2.2)."""
    chunks = len(pipeline_chunks(model.num_layers, cfg.actor)[0])
    return 1 + (layout.pp - 1) / (chunks * micro_batches)


def _exchange(
    cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster, tokens: float, passes: float
) -> float:
    """Seconds in which a stage's devices exchange activations of `tokens`; a forward pass is 1, with backward 3.

    Of tensor parallelism four collectives a layer and pass (arXiv:2205.05198, section 4.2.2), of context parallelism
    queries, keys, values and outputs, of expert parallelism tokens on their way there and back.
    """
    width, layers = 2 if cfg.actor.bf16 else FLOAT32, most_layers(cfg, model)
    tp, cp, ep = layout.tp, layout.cp, layout.ep
    seconds = 4 * model.hidden_size * width * (tp - 1) / tp / cluster.link(tp) if tp > 1 else 0.0
    if cp > 1:
        heads = 2 * (model.num_attention_heads + model.num_query_groups) * model.kv_channels / tp
        seconds += heads * width * (cp - 1) / cp / cluster.link(tp * cp)
    if ep > 1:
        share = model.num_moe_layers / model.num_layers
        sent = 2 * (model.moe_router_topk or 0) * model.hidden_size * width * (ep - 1) / ep
        seconds += share * sent / tp / cluster.link(tp * ep)
    return tokens * passes * layers * seconds


def scoring_seconds(cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster, work: Work) -> float:
    """Of all passes without gradients. A reward model whose folder is not on this machine counts as another actor."""
    stages, seconds = scored_stages(cfg), 0.0
    if REWARD_MODEL in stages:
        scorer, size = resolve_reward_model(cfg) or model, cfg.reward_config.micro_batch_size
        seconds += _pass_seconds(in_place_of_actor(cfg), scorer, layout, cluster, work, size)
    size, others = cfg.rl_config.ref_forward_micro_batch_size, len(set(stages) - {REWARD_MODEL})
    return seconds + others * _pass_seconds(cfg, model, layout, cluster, work, size)


def _pass_seconds(
    cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster, work: Work, sequences: int
) -> float:
    """Of an iteration's passes of one stage, so many sequences each."""
    flops = _flops_per_device(cfg, model, layout, work)
    micro = _micro_batches(cfg, layout, work, sequences)
    computing = flops / cluster.scoring_flops * _bubble(cfg, model, layout, micro * layout.mini_batches)
    return computing + _exchange(cfg, model, layout, cluster, _tokens_per_device(layout, work), 1.0)


def update_seconds(cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster, work: Work) -> float:
    """Of all optimizer steps: passes, what is computed again, the pipeline's bubble, gradients and weights.

    Frozen weights beside adapters (LoRA) need no gradients: a third of the products is left out.
    """
    actor, epochs = cfg.actor, layout.epochs
    again, forward = _recomputed(cfg, model), _flops_per_device(cfg, model, layout, work)
    of_layers = 1 - 2 * model.vocab_size * model.hidden_size / model.forward_flops([1])[0]
    passes = TRAIN_TO_FORWARD - 1 if actor.lora_r else TRAIN_TO_FORWARD
    seconds = passes * forward / cluster.training_flops + again * of_layers * forward / cluster.scoring_flops
    micro = _micro_batches(cfg, layout, work, actor.micro_batch_size)
    computing = seconds * _bubble(cfg, model, layout, micro)
    computing += _exchange(cfg, model, layout, cluster, _tokens_per_device(layout, work), TRAIN_TO_FORWARD + again)
    steps = layout.mini_batches
    last = computing / steps / micro  # passes of one micro-batch
    gradients, parameters = _data_parallel(cfg, model, layout, cluster)
    if actor.overlap_grad_reduce:  # behind the last backward pass, two thirds of its micro-batch
        gradients = max(0.0, gradients - last * 2 / 3)
    if actor.overlap_param_gather:  # behind the first forward pass
        parameters = max(0.0, parameters - last / 3)
    return epochs * (computing + steps * (gradients + parameters + _optimizer(cfg, model, layout, cluster)))


def _recomputed(cfg: Config, model: ModelConfig) -> float:
    """The share of layers whose forward pass is computed twice."""
    if cfg.actor.recompute_granularity != "full":
        return 0.0
    if cfg.actor.recompute_method == "uniform":
        return 1.0
    return min(1.0, (cfg.actor.recompute_num_layers or 0) / most_layers(cfg, model))


def _data_parallel(cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster) -> tuple[float, float]:
    """Seconds for float32 gradients to be added up over DP x CP, and for updated weights to come back."""
    ranks = layout.dp * layout.cp
    if ranks == 1:
        return 0.0, 0.0
    parameters, width = trained_parameters(cfg, model, layout), 2 if cfg.actor.bf16 else FLOAT32
    moved, rate = parameters * (ranks - 1) / ranks, cluster.link(layout.world // layout.pp)
    if not cfg.actor.use_distributed_optimizer:
        return 2 * moved * FLOAT32 / rate, 0.0
    return moved * FLOAT32 / rate, moved * width / rate


def _optimizer(cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster) -> float:
    """Adam reads and writes main weights and two moments in float32, reads gradients, writes weights."""
    parameters = trained_parameters(cfg, model, layout)
    shards = layout.dp * layout.cp if cfg.actor.use_distributed_optimizer else 1
    return parameters * (6 * FLOAT32 + FLOAT32 + 2) / shards / cluster.memory


# ---- between both ------------------------------------------------------------------------------------------------


def resharding_seconds(cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster) -> float:
    """Weights into the engine: whole tensors are put together from TP, PP and EP ranks, and copied."""
    width = 2 if cfg.actor.bf16 else FLOAT32
    ranks = layout.tp * layout.pp * layout.ep
    gathered = model.num_parameters * width * (ranks - 1) / ranks / cluster.link(ranks) if ranks > 1 else 0.0
    copied = 2 * rollout_parameters(model, layout.infer_tp) * width / cluster.memory
    tensors = 12 * model.num_layers + 3 * model.num_moe_layers * (model.num_moe_experts or 0)
    return gathered + copied + tensors * TENSOR + cluster.switch_s


def offload_seconds(cfg: Config, model: ModelConfig, layout: Layout, cluster: Cluster) -> float:
    """Parts that leave the device and come back. Gradients are dropped; what is frozen needs no copy back."""
    if not layout.integrated or cluster.device == "cpu":
        return 0.0
    generate, memory = cfg.generate_config, estimate_memory(cfg, model, layout)
    of_weights = memory.weights if cfg.actor.lora_r else 2 * memory.weights
    moved = of_weights * generate.offload_train_param + 2 * memory.optimizer * generate.offload_train_optimizer
    if has_reference_model(cfg) and generate.offload_reference:
        moved += memory.reference
    if generate.offload_reward_model:
        moved += memory.reward_model
    return moved / cluster.host


def dock_seconds(cfg: Config, layout: Layout, cluster: Cluster, work: Work) -> float:
    """What stages wait for samples to be put and read on the fullest node, and for the controller."""
    per_token = 8 + FLOAT32 * (4 + len(scored_stages(cfg)))
    size = layout.sequences_per_iteration * (8 * work.prompt + per_token * work.response)
    nodes = max(1, layout.devices // cluster.devices_per_node)
    return size / nodes / DOCK_BYTES + controller_seconds(layout, dock_stages(cfg), dock_requests(cfg, layout))


def dock_stages(cfg: Config) -> int:
    """Stages that take samples from the dock: rollout, rewards, advantages and the update, beside scoring."""
    return 4 + len(scored_stages(cfg))


def dock_requests(cfg: Config, layout: Layout) -> int:
    """Claims of an iteration, each acknowledged afterwards: a rank's share of a mini-batch at a time."""
    return layout.dp * layout.mini_batches * dock_stages(cfg)


def controller_seconds(layout: Layout, stages: int, requests: int) -> float:
    """CPU seconds of the controller, which is one process, for an iteration."""
    return layout.sequences_per_iteration * stages * CONTROLLER_ROW + requests * CONTROLLER_CLAIM


def driver_seconds(cfg: Config, layout: Layout) -> float:
    """The driver starts each stage on every worker, one call after the other, and takes the reports."""
    stages = 3 + bool(scored_stages(cfg))  # weights, rollout, scoring, update
    return stages * layout.devices * CALL
