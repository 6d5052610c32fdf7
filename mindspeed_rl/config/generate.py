"""Keys of `generate_config`: the rollout engine, resharding into it, and how tokens are drawn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_rl.config.section import Count, Fraction, NonNegative, Section, Switch
from mindspeed_rl.config.validation import ValidationSamplingConfig

# Said of every truncation of the sampled distribution
_OFF_POLICY = (
    "training scores the untruncated policy: leaving out tokens makes log-probs of rollout and training differ, "
    "and updates off-policy"
)


class SamplingConfig(Section):
    """Keys of `generate_config.sampling_config`."""

    logprobs: Switch | Annotated[int, Field(ge=0, le=1)] = Field(True, description="return sampled tokens' log-probs")
    max_tokens: Count = Field(512, description="longest response in tokens")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description=f"sample from the most likely tokens that together have this probability; {_OFF_POLICY}"
    )
    top_k: Annotated[int, Field(ge=-1)] = Field(
        -1, description=f"sample from so many most likely tokens; -1: all; {_OFF_POLICY}"
    )
    min_p: Fraction = Field(
        0.0, description=f"leave out tokens less likely than this share of the most likely one; {_OFF_POLICY}"
    )
    temperature: NonNegative = Field(1.0, description="logits are divided by it before sampling; above 0")
    detokenize: Switch = Field(
        False, description="let vLLM turn tokens into text (only samples' printing needs text)"
    )
    ignore_eos: Switch = Field(False, description="go on to max_tokens after an end-of-sequence token")


class GenerateConfig(Section):
    """Keys of `generate_config`."""

    infer_tensor_parallel_size: Count = Field(1, description="devices that share one rollout engine")
    infer_pipeline_parallel_size: Count = Field(
        1, description="pipeline stages of a rollout engine; only 1 in this version"
    )
    infer_expert_parallel_size: Count = Field(
        1,
        description="devices that share whole experts: all of an engine, infer_tensor_parallel_size, with "
        "enable_expert_parallel, where it may be left out; else 1",
    )
    enable_expert_parallel: Switch = Field(
        False,
        description="a device of an engine holds whole experts instead of a slice of each; npu and cuda only",
    )
    trust_remote_code: Switch = Field(False, description="let tokenizer and model folders run their own Python code")
    offload_train_optimizer: Switch = Field(False, description="optimizer state on host memory while generating")
    offload_train_grad: Switch = Field(False, description="release gradient buffers while generating")
    offload_train_param: Switch = Field(False, description="training weights on host memory while generating")
    offload_reference: Switch = Field(False, description="reference weights on host memory outside their stage")
    offload_reward_model: Switch = Field(False, description="reward model's weights on host memory outside its stage")
    resharding_bucket_mb: Annotated[float, Field(gt=0)] = Field(
        256,
        description="device memory of one resharding bucket, MiB; two are in use, and the tensors of one parameter",
    )
    validate_weight: Switch = Field(
        False,
        description="after each weight update, prove that rollout's weights are those of training bit for bit, or "
        "stop; it takes the rollout weights' memory once more, and a multiple of the update's time",
    )
    # vLLM
    max_num_seqs: Count = Field(256, description="sequences that one engine generates at once")
    max_model_len: Count = Field(1024, description="longest prompt + response in tokens")
    max_num_batched_tokens: Count | None = Field(
        None, description="tokens that one engine step computes; null: vLLM chooses"
    )
    enforce_eager: Switch = Field(
        True, description="run PyTorch eagerly; false: capture graphs, faster where the device has them"
    )
    torchair_graph: Switch = Field(
        False,
        description="torchair's graphs for DeepSeek models, on NPUs with vLLM-Ascend 0.11; with enforce_eager: false",
    )
    ascend_scheduler: Switch = Field(
        False, description="vLLM-Ascend 0.11's own scheduler, which computes prompts whole and apart from responses"
    )
    enable_prefix_caching: Switch = Field(
        True, description="share the cache of equal prompt beginnings, such as the samples of a group"
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="element type of rollout weights and cache"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="share of device memory")
    cpu_kv_cache_gib: Count = Field(1, description="KV cache of one rank on device: cpu, in GiB")
    num_scheduler_steps: Count = Field(1, description="only 1: the engine schedules at every step")
    per_request_seed: Switch = Field(
        True,
        description="one seed a sample: results do not depend on layout or batching; false: faster on big batches",
    )
    sampling_config: SamplingConfig = Field(SamplingConfig(), description="how tokens are drawn")
    val_sampling_config: ValidationSamplingConfig = Field(
        ValidationSamplingConfig(), description="how they are drawn in validation"
    )
