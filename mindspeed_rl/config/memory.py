"""An estimate of device memory from shapes alone: no device is asked. Upper bounds where padding or timing decide.

All figures are bytes on the fullest device, under the largest pipeline stage. Where rollout has devices of its own,
`training` is of a device that trains and `generating` of one that generates.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.files import resolve_reward_model
from mindspeed_rl.config.layout import (
    Layout,
    has_critic_model,
    has_reference_model,
    in_place_of_actor,
    pipeline_chunks,
    scored_stages,
    stages_beside_rollout,
    uses_full_kl,
    uses_greedy_baseline,
)
from mindspeed_rl.config.lora import adapter_parameters, module_sizes
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.reward import REWARD_MODEL
from mindspeed_rl.config.schema import Config

GIB = 2**30
FLOAT32 = 4
LOGIT_CHUNK = 2048  # response tokens whose logits there are at a time
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device, by what takes them."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    reward_model: int
    critic: int  # its weights, gradients and optimizer
    activations: int
    logits: int
    scoring: int  # what the largest pass without gradients takes, with weights that come to the device for it
    beside_rollout: int  # what the largest of those passes takes that run between steps of rollout
    rollout_weights: int
    buckets: int  # what is exchanged on the way from training to rollout, beside what lies at its places
    kv_per_token: int
    kv_full: int  # cache in which every sequence that can run at once has full length
    training_kept: int  # part of weights, gradients, optimizer, reference and reward model that stays meanwhile

    @property
    def frozen(self) -> int:
        """Weights that are never trained."""
        return self.reference + self.reward_model

    @property
    def training(self) -> int:
        """Peak of an update: weights, gradients, optimizer, all of the critic's, activations and logits."""
        return self.weights + self.gradients + self.optimizer + self.critic + self.activations + self.logits

    @property
    def generating(self) -> int:
        """While generating with a full KV cache, with what of training stays, and scoring in between."""
        return self.rollout_weights + self.kv_full + self.training_kept + self.beside_rollout


def estimate_memory(cfg: Config, model: ModelConfig, layout: Layout) -> MemoryEstimate:
    """Estimate memory of a configuration that has passed the rules.

    With P parameters on the device (`stage_parameters`), w bytes each (2 with bf16, else 4):
    weights P w; gradients 4 P (Megatron reduces in float32); Adam moments 8 P, and 4 P float32 main weights with
    bf16, both divided by DP x CP with the distributed optimizer, those of experts by DP x CP / EP; reference P w when
    `init_kl_coef` > 0, reward model P' w of its own shape (0 where its folder is not on this machine). A critic's
    model takes as much as the actor: its head is small, and it keeps no logits.
    With adapters (LoRA) gradients and optimizer state are of these alone, and the actor is the reference, too.
    """
    actor, generate = cfg.actor, cfg.generate_config
    width = 2 if actor.bf16 else FLOAT32
    parameters = stage_parameters(cfg, model, layout)
    adapters = stage_adapter_parameters(cfg, model, layout)
    weights = (parameters + adapters) * width
    trained = trained_parameters(cfg, model, layout)
    gradients = trained * FLOAT32
    experts = 0 if actor.lora_r else stage_expert_parameters(cfg, model, layout)
    shards = layout.dp * layout.cp if actor.use_distributed_optimizer else 1
    expert_shards = shards // layout.ep if actor.use_distributed_optimizer else 1
    state_bytes = 12 if actor.bf16 else 8
    optimizer = (trained - experts) * state_bytes // shards + experts * state_bytes // expert_shards
    reference = weights if has_reference_model(cfg) else 0
    scorer = resolve_reward_model(cfg)
    reward_model = 0 if scorer is None else stage_parameters(in_place_of_actor(cfg), scorer, layout) * width
    models = 2 if has_critic_model(cfg) else 1
    shared = (
        (0 if generate.offload_train_param else models * weights)
        + (0 if generate.offload_train_grad else models * gradients)
        + (0 if generate.offload_train_optimizer else models * optimizer)
        + (0 if generate.offload_reference else reference)
        + (0 if generate.offload_reward_model else reward_model)
    )
    passes = {
        stage: pass_bytes(in_place_of_actor(cfg), scorer or model, layout, stage)
        if stage == REWARD_MODEL
        else pass_bytes(cfg, model, layout, stage)
        for stage in scored_stages(cfg)
    }
    come = weights if layout.integrated and generate.offload_train_param else 0
    came = {"reference": reference if layout.integrated and generate.offload_reference else 0}
    came[REWARD_MODEL] = reward_model if layout.integrated and generate.offload_reward_model else 0
    came |= {"value": come, "old_log_prob": come, **({"reference": come} if actor.lora_r else {})}
    kv_per_token = kv_bytes_per_token(cfg, model)
    requests = layout.rows_in_generation + (layout.prompts_in_generation if uses_greedy_baseline(cfg) else 0)
    running = min(generate.max_num_seqs, -(-requests // layout.rollout_replicas))
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=reference,
        reward_model=reward_model,
        critic=(models - 1) * (weights + gradients + optimizer),
        activations=activation_bytes(cfg, model, layout),
        logits=logit_bytes(cfg, model, layout),
        scoring=max((came[stage] + passes[stage] for stage in passes), default=0),
        beside_rollout=max((passes[stage] for stage in stages_beside_rollout(cfg, layout)), default=0),
        rollout_weights=rollout_parameters(model, layout.infer_tp) * _DTYPE_BYTES[generate.dtype],
        buckets=bucket_bytes(cfg, model, layout),
        kv_per_token=kv_per_token,
        kv_full=kv_per_token * generate.max_model_len * running,
        training_kept=shared if layout.integrated else 0,
    )


def most_layers(cfg: Config, model: ModelConfig) -> int:
    """Layers of the largest pipeline stage."""
    return max(sum(map(len, stage)) for stage in pipeline_chunks(model.num_layers, cfg.actor))


def stage_parameters(cfg: Config, model: ModelConfig, layout: Layout) -> int:
    """Parameters on a device of the largest pipeline stage: its layers and, where PP > 1, one embedding; over TP.

    Experts are divided by EP as well, `replicated_parameters` by neither.
    Norm weights, which every tensor-parallel rank holds whole, are counted as if divided: less than 0.1 %.
    """
    layers = most_layers(cfg, model)
    replicated = model.replicated_parameters * layers // model.num_layers
    embedding = model.padded_vocab_size(layout.tp) * model.hidden_size
    copies = 1 if layout.pp > 1 or not model.untie_embeddings_and_output_weights else 2
    stored = model.vocab_size * model.hidden_size * (2 if model.untie_embeddings_and_output_weights else 1)
    in_layers = model.num_parameters - model.expert_parameters - model.replicated_parameters - stored
    in_stage = in_layers * layers // model.num_layers
    divided = (in_stage + copies * embedding) // layout.tp
    return divided + replicated + stage_expert_parameters(cfg, model, layout)


def stage_adapter_parameters(cfg: Config, model: ModelConfig, layout: Layout) -> int:
    """Of the largest pipeline stage, on one tensor-parallel rank."""
    return adapter_parameters(model, cfg.actor, most_layers(cfg, model), layout.tp)


def trained_parameters(cfg: Config, model: ModelConfig, layout: Layout) -> int:
    """Parameters on a device of the largest stage that have gradients and optimizer state."""
    if cfg.actor.lora_r:
        return stage_adapter_parameters(cfg, model, layout)
    return stage_parameters(cfg, model, layout)


def stage_expert_parameters(cfg: Config, model: ModelConfig, layout: Layout) -> int:
    """The part of `stage_parameters` that are experts, of the stage with most of them, divided by TP and EP."""
    if not model.num_moe_layers:
        return 0
    stages = pipeline_chunks(model.num_layers, cfg.actor)
    layers = max(sum(model.is_moe_layer(layer) for chunk in stage for layer in chunk) for stage in stages)
    return model.expert_parameters * layers // (model.num_moe_layers * layout.tp * layout.ep)


def rollout_parameters(model: ModelConfig, infer_tp: int) -> int:
    """Parameters on a device of rollout: divided by its tensor parallelism, `replicated_parameters` excepted."""
    return (model.num_parameters - model.replicated_parameters) // infer_tp + model.replicated_parameters


def micro_batch_tokens(cfg: Config, layout: Layout) -> int:
    """Most tokens of a micro-batch of the update on a device."""
    models = (cfg.actor, cfg.critic) if has_critic_model(cfg) else (cfg.actor,)
    return pass_tokens(cfg, layout, max(model.micro_batch_size for model in models))


def pass_tokens(cfg: Config, layout: Layout, sequences: int) -> int:
    """Most tokens of a pass on a device.

    The cap of a micro-batch, or a fixed number of sequences of full length, divided by context parallelism.
    """
    mini_batch = layout.sequences_per_mini_batch_per_rank * cfg.actor.seq_length
    fixed = sequences * cfg.actor.seq_length
    return -(-min(cfg.rl_config.max_packing_token_size or fixed, mini_batch) // layout.cp)


@dataclass(frozen=True)
class _LayerElements:
    """What a layer makes of a token on a device, in elements: see `activation_bytes`."""

    hidden: float
    gathered: float  # whole hidden state that sequence parallelism puts together for a product
    attention: float
    mlp: float  # mean over layers with and without experts
    largest_mlp: float
    adapters: float  # what low-rank adapters make in between

    @property
    def kept(self) -> float:
        """For the backward pass."""
        return 4 * self.hidden + self.attention + self.mlp + self.adapters

    @property
    def at_once(self) -> float:
        """Without gradients: residual, its norm, a product's result, and what attention or MLP makes, the more."""
        return 3 * self.hidden + self.gathered + max(self.attention, self.largest_mlp)


def _layer_elements(cfg: Config, model: ModelConfig, layout: Layout) -> _LayerElements:
    tp = layout.tp
    replicated = tp if cfg.actor.sequence_parallel else 1
    latents = 2 * ((model.q_lora_rank or 0) + (model.kv_lora_rank or 0)) / replicated
    heads = (2 * model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels / tp
    dense, experts = _mlp_elements(model, tp, 3)
    kept_dense, kept_experts = _mlp_elements(model, tp, 2 if cfg.actor.recompute_activation_function else 3)
    share = model.num_moe_layers / model.num_layers
    return _LayerElements(
        hidden=model.hidden_size / replicated,
        gathered=model.hidden_size if replicated > 1 else 0,
        attention=latents + heads,
        mlp=(1 - share) * kept_dense + share * kept_experts,
        largest_mlp=max(dense if share < 1 else 0, experts if share else 0),
        adapters=cfg.actor.lora_r * len(cfg.actor.lora_target_modules),
    )


def _mlp_elements(model: ModelConfig, tp: int, parts: int) -> tuple[float, float]:
    """Of a token in a layer without and with experts; `parts`: gate, up, and their product unless it is made anew."""
    routed = (model.moe_router_topk or 0) * (2 * model.hidden_size + parts * (model.moe_ffn_hidden_size or 0) / tp)
    shared = parts * (model.moe_shared_expert_intermediate_size or 0) / tp
    return parts * model.ffn_hidden_size / tp, routed + shared


def pass_bytes(cfg: Config, model: ModelConfig, layout: Layout, stage: str) -> int:
    """What a pass of a scoring stage takes: one layer at a time, or hidden states and logits of a chunk."""
    rl, width = cfg.rl_config, 2 if cfg.actor.bf16 else FLOAT32
    sizes = {
        "reference": cfg.actor.micro_batch_size if cfg.is_supervised else rl.ref_forward_micro_batch_size,
        "value": rl.critic_forward_micro_batch_size,
        "old_log_prob": rl.actor_forward_micro_batch_size,
        REWARD_MODEL: cfg.reward_config.micro_batch_size,
    }
    tokens, per_token = pass_tokens(cfg, layout, sizes[stage]), _layer_elements(cfg, model, layout)
    columns = 0 if stage in ("value", REWARD_MODEL) else model.padded_vocab_size(layout.tp) // layout.tp
    logits = min(tokens, LOGIT_CHUNK) * columns * (width + FLOAT32)
    return int(max(tokens * per_token.at_once * width, tokens * per_token.hidden * width + logits))


def activation_bytes(cfg: Config, model: ModelConfig, layout: Layout) -> int:
    """Activations kept for the backward pass on the first pipeline stage, taken to be the largest.

    Micro-batches are of full length.

    A layer keeps, per token and with flash attention (after Korthikanti et al. 2022, "Reducing Activation
    Recomputation in Large Transformer Models", counted anew for SwiGLU and grouped queries without dropout), in units
    of the element size: input, both norms' outputs and the attention's residual 4 h, over TP with sequence parallel;
    q, k, v and attention output (2 q + 2 kv) d / TP, gate, up and product 3 f / TP. In a layer with experts, evenly
    used, a token is there k times: its input and output 2 h k, and 3 f k / TP with the width f of an expert; beside
    3 f / TP of the shared expert. Latent attention has as many key/value as query heads, and its short vectors before
    and after their norms, 2 l, over TP with sequence parallel. `full` recomputation keeps the input alone of a
    recomputed layer (`block`) or of a group of layers (`uniform`), in each chunk, and one group while it is redone.
    The first of PP stages has up to PP micro-batches in flight; interleaved in V chunks 1 + (PP - 1) / (PP V) times
    as many of its layers' activations (same paper, section 4.2.3).
    """
    actor, per_token = cfg.actor, _layer_elements(cfg, model, layout)
    hidden, layer = per_token.hidden, per_token.kept
    stages = pipeline_chunks(model.num_layers, actor)
    chunks = max(([len(layers) for layers in stage] for stage in stages), key=sum)
    layers, group = sum(chunks), actor.recompute_num_layers or 1
    if actor.recompute_granularity != "full":
        kept, redone = layers * layer, 0.0
    elif actor.recompute_method == "uniform":
        kept, redone = sum(-(-size // group) for size in chunks) * hidden, min(group, max(chunks)) * layer
    else:
        whole = sum(max(size - group, 0) for size in chunks)
        kept, redone = whole * layer + (layers - whole) * hidden, layer
    tokens = micro_batch_tokens(cfg, layout)
    stages_full = float(layout.pp)
    if actor.num_layers_per_virtual_pipeline_stage:
        stages_full += (layout.pp - 1) * actor.num_layers_per_virtual_pipeline_stage / layers
    mini_batch = layout.sequences_per_mini_batch_per_rank * actor.seq_length / layout.cp
    in_flight = min(stages_full * tokens, mini_batch)
    return int((in_flight * kept + tokens * redone) * (2 if actor.bf16 else FLOAT32))


def logit_bytes(cfg: Config, model: ModelConfig, layout: Layout) -> int:
    """Logits of a chunk of tokens, and what is made of the output layer's weights V h / TP.

    The logits and their gradient, and two copies in float32 (which CUDA's kernels do without); the gradient of the
    weights in float32, and in their own width. With the KL over the vocabulary the reference's logits and one more
    copy in float32, a gradient more, and the reference's final hidden states of a mini-batch's responses. Weights
    that are frozen beside adapters (LoRA) have no gradient.
    """
    actor, full = cfg.actor, uses_full_kl(cfg)
    width = 2 if actor.bf16 else FLOAT32
    tokens, columns = (
        min(micro_batch_tokens(cfg, layout), LOGIT_CHUNK),
        model.padded_vocab_size(layout.tp) // layout.tp,
    )
    chunk = tokens * columns * ((3 * width + 3 * FLOAT32) if full else (2 * width + 2 * FLOAT32))
    gradients = 0 if actor.lora_r else columns * model.hidden_size * (FLOAT32 + (2 if full else 1) * width)
    responses = layout.sequences_per_mini_batch_per_rank * cfg.longest_response
    return chunk + gradients + (responses * model.hidden_size * width // layout.cp if full else 0)


def bucket_bytes(cfg: Config, model: ModelConfig, layout: Layout) -> int:
    """Two buckets of the export, and the largest parameter put together from them; 0 where nothing is exchanged.

    Before that a rank merges adapters (LoRA) into its part of a weight: that in float32, the sum in float32 and as it
    is sent, of the weights of one bucket or of the largest.
    """
    width = 2 if cfg.actor.bf16 else FLOAT32
    merging = 0
    if cfg.actor.lora_r:
        sizes = (module_sizes(model, module) for module in cfg.actor.lora_target_modules)
        merging = max(inputs * outputs for inputs, outputs in sizes) // layout.tp * (2 * FLOAT32 + width)
    if layout.tp == layout.pp == layout.ep == 1:
        return merging
    bucket = min(int(cfg.generate_config.resharding_bucket_mb * 2**20), model.num_parameters * width)
    largest = max(model.vocab_size, 2 * model.ffn_hidden_size) * model.hidden_size * width  # gate and up are one
    return 2 * bucket + largest + merging + (bucket if merging else 0)


def kv_bytes_per_token(cfg: Config, model: ModelConfig) -> int:
    """Keys and values of one token on one device: 2 x layers x ceil(groups / infer TP) x head size x element size.

    With latent attention every device keeps the vector that they come from, and the rotating part of the keys.
    """
    width = _DTYPE_BYTES[cfg.generate_config.dtype]
    if model.kv_lora_rank is not None and cfg.device != "cpu":  # whose rollout computes keys and values first
        return model.num_layers * (model.kv_lora_rank + model.rotary_channels) * width
    groups = -(-model.num_query_groups // cfg.generate_config.infer_tensor_parallel_size)
    return 2 * model.num_layers * groups * model.kv_channels * width
