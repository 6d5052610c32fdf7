"""The configuration schema: every key, its type, default and meaning.

Four sections in the layout MindSpeed RL users know. `megatron_training` holds training-engine defaults;
`actor_config` overlays them for actor and reference (`Config.actor` is the result). Counts of samples —
`global_batch_size`, `mini_batch_size` — are in **prompts**; micro-batch sizes are in **sequences** per rank.
Unknown keys are refused; nothing here is accepted and ignored.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from mindspeed_rl.config.algorithm import AlgorithmConfig
from mindspeed_rl.config.data import DataConfig
from mindspeed_rl.config.environment import DETERMINISTIC, RuntimeEnvConfig
from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.config.lora import LoraConfig
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.reward import RewardConfig
from mindspeed_rl.config.reward_model import RewardModelConfig
from mindspeed_rl.config.section import (
    Count,
    Decay,
    Fraction,
    Layers,
    Minutes,
    NonNegative,
    Section,
    Share,
    Switch,
)
from mindspeed_rl.config.supervised import STAGES as SUPERVISED_STAGES
from mindspeed_rl.config.supervised import DPOConfig, SFTConfig
from mindspeed_rl.config.tools import ToolsConfig
from mindspeed_rl.config.validation import ValidationConfig


class MegatronConfig(LoraConfig, DataConfig):
    """Keys of `megatron_training` (defaults for every model) and `actor_config` (overrides for the actor).

    Those on data and on adapters (LoRA) apart.
    """

    # run
    stage: Literal["ray_grpo", "ray_dapo", "ray_ppo", "sft", "dpo"] = Field(
        "ray_grpo",
        description="command that the run is for: cli/train_grpo.py, train_dapo.py, or train_ppo.py, which has a "
        "critic (adv_estimator: gae); or without rollout, train_sft.py and train_dpo.py",
    )
    model: str = Field(
        "auto", description="preset name from `defaults`, or `auto`: read the checkpoint's config.json"
    )
    global_batch_size: Count = Field(
        32,
        description="prompts per iteration, after which rollout weights are synced; of stages sft and dpo rows per "
        "optimizer step",
    )
    train_iters: Count = Field(100, description="iterations to run in all, a resumed run's earlier ones included")
    save_interval: Count = Field(100, description="iterations between checkpoints; the last iteration is saved too")
    # with a rollout replica's number added, it still is one of numpy's seeds, which end at 2^32
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        1234, description="seed of data order, sampling and initialisation"
    )
    seq_length: Count = Field(1024, description="longest prompt + response that training accepts, in tokens")
    # precision and parallel layout
    bf16: Switch = Field(False, description="train in bfloat16 with float32 main weights; false: float32")
    micro_batch_size: Count = Field(1, description="sequences per rank in one forward-backward pass")
    tensor_model_parallel_size: Count = Field(1, description="devices that share each layer (TP)")
    pipeline_model_parallel_size: Count = Field(1, description="stages that the layers are divided into (PP)")
    num_layers_per_virtual_pipeline_stage: Count | None = Field(
        None, description="with PP > 1: interleaved schedule whose model chunks have so many layers each (VPP)"
    )
    num_layer_list: Layers | None = Field(
        None, description="layers of each pipeline stage, such as `7,9`; null: equally many"
    )
    noop_layers: Layers | None = Field(
        None,
        description="positions left empty when the layers are divided evenly over the stages, "
        "such as `61,62,63` for 61 layers over 16 stages; they cost nothing",
    )
    context_parallel_size: Count = Field(1, description="devices that share the tokens of a micro-batch (CP)")
    context_parallel_algo: Literal["ulysses_cp_algo", "megatron_cp_algo"] = Field(
        "ulysses_cp_algo",
        description="how they attend to each other's tokens: each takes all tokens of some heads (ulysses), or keys "
        "and values pass from one to the next (megatron: ring attention; any number of heads; not on npu)",
    )
    expert_model_parallel_size: Count = Field(
        1, description="data- and context-parallel devices that share the experts of each layer (EP)"
    )
    sequence_parallel: Switch = Field(False, description="divide activations outside attention and MLP over TP too")
    use_distributed_optimizer: Switch = Field(True, description="shard optimizer state over data-parallel ranks")
    overlap_grad_reduce: Switch = Field(
        False, description="reduce gradients over data-parallel ranks during backward"
    )
    overlap_param_gather: Switch = Field(
        False, description="gather updated weights during the next forward pass; needs overlap_grad_reduce"
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(None, description="activation recomputation")
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="with `full`: recompute groups of layers (uniform) or the first layers (block)"
    )
    recompute_num_layers: Count | None = Field(
        None, description="with `full`: layers of a group (uniform), or layers recomputed (block)"
    )
    recompute_activation_function: Switch = Field(
        False,
        description="compute the MLP's activation anew in the backward pass instead of keeping it; npu only, where "
        "MindSpeed does it",
    )
    # kernels, and features of MindSpeed (docs/ascend.md)
    use_flash_attn: Switch | None = Field(
        None, description="attention over packed sequences in the device's fused kernel; only true, which null means"
    )
    use_fused_rmsnorm: Switch | None = Field(
        None, description="RMS norm in one kernel: npu true or false, cuda true, cpu false; null: the first of these"
    )
    use_fused_swiglu: Switch | None = Field(
        None, description="SwiGLU in one kernel: npu and cuda true or false, cpu false; null: the first of these"
    )
    use_fused_rotary_pos_emb: Switch | None = Field(
        None, description="rotary embedding in one kernel: npu true or false, cuda true, cpu false; null: the first"
    )
    reuse_fp32_param: Switch = Field(
        False, description="only false: bf16 weights in the halves of float32 main weights, which others read here"
    )
    swap_optimizer: Switch = Field(
        False,
        description="only false: optimizer state on the host, but for the step; offload_train_optimizer keeps it "
        "there while generating",
    )
    swap_attention: Switch = Field(
        False, description="only false: activations on the host until the backward pass; see recompute_granularity"
    )
    moe_tp_extend_ep: Switch = Field(
        False, description="only false: tensor-parallel ranks hold whole experts; see expert_model_parallel_size"
    )
    npu_deterministic: Switch = Field(
        False, description="the same results from the same inputs, at the cost of speed; npu only"
    )
    distributed_timeout_minutes: Minutes = Field(10, description="deadline of one collective")
    # optimizer
    lr: Annotated[float, Field(gt=0)] = Field(1e-6, description="(peak) learning rate")
    min_lr: NonNegative = Field(0.0, description="learning rate at the end of the decay")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant",
        description="shape of the decay over all optimizer steps of the run; `WSD`: warm-up, then stable, then decay",
    )
    lr_wsd_decay_fraction: Share | None = Field(
        None, description="with `WSD`: share of all optimizer steps over which the learning rate decays in the end"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine"] = Field(
        "exponential", description="with `WSD`: shape of that decay"
    )
    lr_warmup_fraction: Fraction = Field(0.0, description="share of all optimizer steps spent on linear warm-up")
    weight_decay: NonNegative = Field(0.01, description="decoupled weight decay of AdamW")
    clip_grad: NonNegative = Field(1.0, description="largest global gradient norm; 0: no clipping")
    adam_beta1: Decay = Field(0.9, description="decay of the first moment")
    adam_beta2: Decay = Field(0.95, description="decay of the second moment")
    adam_eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="added to the root of the second moment")
    # checkpoints
    load: str | None = Field(
        None,
        description="Hugging Face folder, or a checkpoint of this trainer, whatever layout it was made with",
    )
    save: str | None = Field(None, description="folder for checkpoints; null: save none")
    keep_last: Count | None = Field(None, description="newest checkpoints to keep in `save`; null: all of them")
    save_hf: Switch = Field(
        False, description="put the weights as a Hugging Face folder into every checkpoint too, under `hf`"
    )
    async_save: Switch = Field(
        False,
        description="write checkpoints while training goes on, from a copy of the state in host memory; "
        "one at a time, and the last one is waited for",
    )
    resume: Literal["auto", "never"] = Field("never", description="auto: go on from the newest checkpoint in `save`")
    finetune: Switch = Field(
        False,
        description="take only the weights from `load`: iteration, data start afresh",
    )
    no_load_optim: Switch = Field(
        False, description="do not load optimizer and scheduler state, neither from `load` nor on `resume`"
    )
    no_load_rng: Switch = Field(
        False, description="do not load random-number state, neither from `load` nor on `resume`"
    )
    no_save_optim: Switch = Field(False, description="do not save optimizer and scheduler state")
    no_save_rng: Switch = Field(False, description="do not save random-number state")

    @property
    def order_seed(self) -> int:
        """Of the order of data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def uses_ring_attention(self) -> bool:
        """Several devices share tokens, and pass keys and values on."""
        return self.context_parallel_size > 1 and self.context_parallel_algo == "megatron_cp_algo"


class ResourceConfig(Section):
    """Devices given to a role."""

    num_npus: Count = Field(
        1,
        validation_alias=AliasChoices("num_npus", "num_devices"),
        description="number of devices, of whatever kind runs (alias: num_devices)",
    )

    @model_validator(mode="before")
    @classmethod
    def _named_once(cls, value: Any) -> Any:
        if isinstance(value, dict) and {"num_npus", "num_devices"} <= value.keys():
            raise ValueError("num_devices is another name of num_npus, which is set too: keep one of the two")
        return value


class RLConfig(AlgorithmConfig, RewardConfig, ValidationConfig):
    """Keys of `rl_config`, those of the algorithm, of rewards and of validation apart."""

    use_integrated_worker: Switch = Field(
        True, description="actor, reference and rollout share each device; false: rollout has devices of its own"
    )
    blocking: Switch = Field(False, description="true: stages in turn; false: scoring starts while others generate")
    staleness: Annotated[int, Field(ge=0)] = Field(
        0,
        description="iterations that rollout may be ahead of training; above 0 needs use_integrated_worker: false",
    )
    guarantee_order: Switch = Field(True, description="TransferDock hands rows out in data-set order")
    shuffle_mini_batch: Switch = Field(
        False, description="shuffle the iteration's prompts into mini-batches; needs guarantee_order"
    )
    epochs: Count = Field(1, description="passes over an iteration's samples")
    mini_batch_size: Count = Field(32, description="prompts per optimizer step")
    n_samples_per_prompt: Count = Field(8, description="responses generated for each prompt (the group)")
    max_prompt_length: Count = Field(512, description="longer prompts are treated as `truncation` says")
    actor_forward_micro_batch_size: Count = Field(8, description="sequences a pass when computing old log-probs")
    critic_forward_micro_batch_size: Count = Field(8, description="sequences a pass when computing values")
    ref_forward_micro_batch_size: Count = Field(8, description="sequences a pass when computing reference log-probs")
    use_remove_padding: Switch = Field(True, description="pack sequences end to end, without padding; only true")
    use_dynamic_bsz: Switch = Field(
        False, description="micro-batches of as many sequences as max_packing_token_size holds, not of a fixed number"
    )
    max_packing_token_size: Count | None = Field(
        None, description="with `use_dynamic_bsz`: most tokens, prompts and responses, of a micro-batch"
    )
    balance_batch: Switch = Field(
        True,
        description="share a mini-batch out over data-parallel ranks by the cost of its sequences; which sequences a "
        "mini-batch holds never changes",
    )
    # partial rollout
    partial_rollout_max_split: Count = Field(
        1,
        description="iterations that a response may be generated over; above 1, an iteration ends when enough groups "
        "are complete, and unfinished responses go on in the next one (partial rollout)",
    )
    partial_rollout_threshold: Annotated[float, Field(ge=0.5, le=1)] = Field(
        0.8,
        description="with partial rollout: global_batch_size is this share of the prompts in generation; the others "
        "are carried over",
    )
    require_max_age_all_finished: Switch = Field(
        True,
        description="with partial rollout: an iteration waits for groups in their last iteration; false: their "
        "responses end where they are",
    )
    # dynamic sampling
    filter_groups_enable: Switch = Field(
        False,
        description="train on groups only whose filter_groups_metric differs within the group, and generate "
        "global_batch_size prompts at a time until there are enough (DAPO's dynamic sampling); surplus groups are "
        "carried over to the next iteration",
    )
    filter_groups_metric: str = Field(
        "reward",
        description="with `filter_groups_enable`: `reward`, a verifier of verifier_function, or `reward_model`",
    )
    filter_groups_max_batches: Count = Field(
        4,
        description="with `filter_groups_enable`: how often global_batch_size prompts may be generated for an "
        "iteration; what lacks then is made up with groups that do not differ",
    )
    # resources
    actor_resource: ResourceConfig = Field(
        ResourceConfig(), description="devices of actor and reference, and of rollout with use_integrated_worker"
    )
    rollout_resource: ResourceConfig | None = Field(
        None, description="devices of rollout with use_integrated_worker: false"
    )
    num_cpus_for_local_task: NonNegative = Field(1.0, description="CPUs Ray reserves for each local (CPU) actor")
    start_timeout_minutes: Minutes = Field(30, description="deadline for start-up")
    stage_timeout_minutes: Minutes = Field(60, description="deadline for one stage of a step")
    # logging
    log_max_throughput: Switch = Field(False, description="tokens/s from the slowest rank's time instead of the mean")
    use_tensorboard: Switch = Field(True, description="write TensorBoard files; off while `use_wandb` is true")
    use_wandb: Switch = Field(False, description="log to Weights & Biases (extra `wandb`)")
    wandb_project: str | None = Field(None, description="project of the run, with `use_wandb`")
    wandb_exp_name: str | None = Field(None, description="name of the run, with `use_wandb`")
    wandb_save_dir: str | None = Field(None, description="local folder of its files, with `use_wandb`")
    use_swanlab: Switch = Field(False, description="log to SwanLab (extra `swanlab`)")
    use_mlflow: Switch = Field(False, description="log to MLflow (extra `mlflow`)")
    sample_log_interval: Annotated[int, Field(ge=0)] = Field(10, description="steps between printed samples; 0: none")


class ProfilerConfig(Section):
    """Which stages' operators and kernels are recorded; off where no steps are named."""

    steps: list[Count] = Field([], description="steps that are recorded, from 1 on; none: nothing is")
    ranks: list[Annotated[int, Field(ge=0)]] = Field(
        [0], description="workers that record: training ranks, and after them those of rollout apart from training"
    )
    what: list[Literal["resharding", "rollout", "scoring", "update"]] = Field(
        ["resharding", "rollout", "scoring", "update"],
        description="what is recorded; scoring in between generation is part of rollout",
    )
    with_shapes: Switch = Field(False, description="record the shapes of operators' inputs, too")
    with_memory: Switch = Field(False, description="record memory taken and given back, too")
    with_stack: Switch = Field(False, description="record the source code's lines that called operators, too")


class Config(Section):
    """A whole run."""

    megatron_training: MegatronConfig = Field(description="training-engine defaults for every model")
    actor_config: MegatronConfig = Field(MegatronConfig(), description="what differs for actor and reference")
    critic_config: MegatronConfig = Field(
        MegatronConfig(), description="with ray_ppo: what differs for the critic, which shares the actor's devices"
    )
    reward_config: RewardModelConfig = Field(
        RewardModelConfig(), description="a reward model, which shares the actor's devices"
    )
    rl_config: RLConfig = Field(RLConfig(), description="algorithm, rewards, resources and logging")
    generate_config: GenerateConfig = Field(GenerateConfig(), description="rollout engine and sampling")
    tools_config: ToolsConfig = Field(ToolsConfig(), description="tools that the model may call (docs/tools.md)")
    sft_config: SFTConfig = Field(SFTConfig(), description="with stage sft: supervised fine-tuning")
    dpo_config: DPOConfig = Field(DPOConfig(), description="with stage dpo: direct preference optimisation")
    model: dict[str, ModelConfig] = Field({}, description="model presets, filled by `defaults: - model: <preset>`")
    device: Literal["auto", "npu", "cuda", "cpu"] = Field("auto", description="kind of device that runs")
    device_memory_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="memory of one device: a plan that cannot fit is refused; null: it is found out by running"
    )
    runtime_env: RuntimeEnvConfig = Field(
        RuntimeEnvConfig(), description="environment of the processes that the run starts"
    )
    ray_address: str | None = Field(None, description="running Ray cluster; null: RAY_ADDRESS, else start one here")
    output_dir: str = Field("outputs", description="parent of the run folder: logs, metrics, resolved configuration")
    trace: Switch = Field(
        False, description="write the timeline of all processes, `trace.json` in the run folder, for Perfetto"
    )
    profiler: ProfilerConfig = Field(
        ProfilerConfig(), description="operators and kernels of chosen steps, written to `profile/` in the run folder"
    )
    run_name: str | None = Field(
        None, description="name of the run folder, one path component; null: configuration name and time"
    )

    @cached_property
    def actor(self) -> MegatronConfig:
        """`megatron_training` overlaid with the keys that `actor_config` sets."""
        return _overlaid(self.megatron_training, self.actor_config)

    @cached_property
    def critic(self) -> MegatronConfig:
        """`actor` overlaid with the keys that `critic_config` sets."""
        return _overlaid(self.actor, self.critic_config)

    @cached_property
    def reward_model(self) -> MegatronConfig:
        """The actor's layout and precision for a reward model, whose layers pipeline stages share evenly."""
        recompute = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        changes: dict[str, Any] = dict.fromkeys(("num_layer_list", "noop_layers", *recompute))
        changes["seq_length"] = self.reward_config.max_length or self.actor.seq_length
        return self.actor.model_copy(update=changes)

    @property
    def is_supervised(self) -> bool:
        """Responses are given, not generated."""
        return self.actor.stage in SUPERVISED_STAGES

    @property
    def longest_response(self) -> int:
        """Most tokens of a response, answers of tools included."""
        turn, tools = self.generate_config.sampling_config.max_tokens, self.tools_config
        return tools.max_total_response_length or turn if tools.enabled else turn

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and its response."""
        if self.is_supervised:
            return self.actor.seq_length
        return self.rl_config.max_prompt_length + self.longest_response

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process that the run starts, beside those that the trainer sets itself."""
        return {**(DETERMINISTIC if self.actor.npu_deterministic else {}), **self.runtime_env.env_vars}


def _overlaid(base: MegatronConfig, changes: MegatronConfig) -> MegatronConfig:
    return MegatronConfig(**{**base.model_dump(exclude_unset=True), **changes.model_dump(exclude_unset=True)})
