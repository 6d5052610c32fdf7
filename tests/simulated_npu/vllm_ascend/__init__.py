"""vLLM's platform for the simulated NPU: vLLM finds it as it finds vLLM-Ascend, and then runs its CPU build.

Real are vLLM's engine, scheduler and CPU kernels, the platform plugin, and the way of new weights: from tensors of
the NPU through `mindspeed_rl/engine/vllm/npu.py`, in place, copied by each parameter's own loader. Simulated is where
it runs: weights and KV cache are in host memory, and the NPU accounts for as many bytes. `sleep` gives those back and
makes the weights NaN, so that a response shows if it was made before new weights came; `wake_up` takes them again.
vLLM-Ascend's own kernels and layouts are not here, so mixtures of experts cannot be generated with: the CPU's kernels
keep experts in another order than `experts_as_loaded` of that module knows.
"""

import os


def register() -> str:
    """Called by vLLM before it does anything with a platform."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else all ranks of a machine are on the same cores
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # helpers of the sampler would be compiled even in eager mode
    return "vllm_ascend.platform.NPUPlatform"
