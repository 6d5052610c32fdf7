"""Rollout with vLLM inside the training process, over the training world (`external_launcher`)."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.checkpoint.files import read_json
from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.engine.base import Generation, GenerationRequest
from mindspeed_rl.engine.vllm import cpu, cuda, npu, validation
from mindspeed_rl.engine.vllm.direct_load import DirectLoader
from mindspeed_rl.engine.vllm.versions import name_of_request, sampling_arguments


class VllmEngine:
    """See `mindspeed_rl.engine.base.GenerationEngine`. Its weights are meaningless until `update_weights`.

    Args:
        cfg: generation settings.
        model_folder: Hugging Face folder; its configuration is read, its weights are not.
        device: this process's device.
        seed: of the engine's own generator; the same on the ranks of one tensor-parallel group.
        stop_tokens: ids that end a response.
        interruptible: whether `unfinished` and `interrupt` will be called, for which responses are kept at hand.

    Raises:
        ConfigError: whole experts on each device are asked for, and the device is a CPU; or a feature of vLLM-Ascend
            that the installed version no longer has.
    """

    def __init__(
        self,
        cfg: GenerateConfig,
        model_folder: str,
        device: Device,
        seed: int,
        stop_tokens: Sequence[int],
        interruptible: bool = True,
    ):
        if cfg.enable_expert_parallel and device.name == "cpu":  # known only now with `device: auto`
            message = "vLLM's CPU kernels take no map of a rank's experts"
            raise ConfigError([Violation("generate_config.enable_expert_parallel", True, message, "set it to false")])
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine must share this process with Megatron
        os.environ.update(device.vllm_environment(cfg.cpu_kv_cache_gib, cfg.enforce_eager))
        from vllm import LLM

        _know_model_class(model_folder)
        self.cfg, self.device, self.interruptible = cfg, device, interruptible
        self.stop_tokens = list(stop_tokens)
        self.can_sleep = device.rollout_can_sleep
        self.asleep_bytes = self._woken_bytes = 0
        loaders: dict[str, Any] = {"cpu": cpu.reload_weights, "npu": npu.load_weights}
        self._load_weights = loaders.get(device.name) or DirectLoader().load
        self._running: dict[str, GenerationRequest] = {}  # by our name of it
        self._outputs: dict[str, Any] = {}  # what vLLM said of them last, if anything
        self._engine_names: dict[str, str] = {}  # our name -> vLLM's
        with cpu.private_shared_memory() if device.name == "cpu" else nullcontext():
            self.llm = LLM(**self._arguments(model_folder, seed))
        self._scheduler = cuda.decode_scheduler(self.llm) if device.name == "cuda" else None

    def _arguments(self, model_folder: str, seed: int) -> dict[str, Any]:
        cfg = self.cfg
        return {
            "model": model_folder,
            "config_format": "hf",  # what training reads; Mistral's folders hold its own format, too
            "load_format": "dummy",
            "skip_tokenizer_init": not cfg.sampling_config.detokenize,
            "trust_remote_code": cfg.trust_remote_code,
            "dtype": cfg.dtype,
            "tensor_parallel_size": cfg.infer_tensor_parallel_size,
            "enable_expert_parallel": cfg.enable_expert_parallel,
            "distributed_executor_backend": "external_launcher",
            "max_model_len": cfg.max_model_len,
            "max_num_seqs": cfg.max_num_seqs,
            "max_num_batched_tokens": cfg.max_num_batched_tokens,
            "enforce_eager": cfg.enforce_eager,
            **(cpu.arguments(model_folder) if self.device.name == "cpu" else {}),
            **(cuda.arguments(cfg, self.interruptible) if self.device.name == "cuda" else {}),
            **(npu.arguments(cfg) if self.device.name == "npu" else {}),
            "enable_prefix_caching": cfg.enable_prefix_caching,
            "gpu_memory_utilization": cfg.gpu_memory_utilization,
            "enable_sleep_mode": self.can_sleep,
            # it would look for the devices of the other ranks, of which Ray shows this process none
            "disable_custom_all_reduce": True,
            "logprobs_mode": "processed_logprobs",  # after temperature and truncation: what was really sampled from
            "disable_log_stats": True,
            "seed": seed,
        }

    def _sampling_params(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling or self.cfg.sampling_config
        return SamplingParams(
            output_kind=RequestOutputKind.CUMULATIVE if self.interruptible else RequestOutputKind.FINAL_ONLY,
            temperature=0.0 if request.greedy else sampling.temperature,  # 0: top_p and the like have no effect
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=request.max_tokens or sampling.max_tokens - len(request.generated),
            # 0: of the sampled token alone
            logprobs=0 if self._has_log_probs(request) else None,
            seed=request.seed,
            stop_token_ids=[] if sampling.ignore_eos else self.stop_tokens,
            ignore_eos=sampling.ignore_eos,
            detokenize=sampling.detokenize,
            **sampling_arguments(SamplingParams),
        )

    def _has_log_probs(self, request: GenerationRequest) -> bool:
        return bool(self.cfg.sampling_config.logprobs) and not request.greedy and request.sampling is None

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Generation]]:
        """Yield after every engine step, with the responses that it finished (possibly none)."""
        engine = self.llm.llm_engine
        self.add(requests)
        with _no_garbage_collection():
            while engine.has_unfinished_requests():
                outputs = engine.step()
                self._outputs |= {output.request_id: output for output in outputs}
                yield [self._end(output.request_id) for output in outputs if output.finished]

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Have these generated, too, while `generate` is under way."""
        for request in requests:
            prompt: Any = {"prompt_token_ids": [*request.prompt.tolist(), *request.generated]}
            name = f"{request.row} greedy" if request.greedy else str(request.row)
            if request.turn:
                name = f"{request.row} turn {request.turn}"
            returned = self.llm.llm_engine.add_request(name, prompt, self._sampling_params(request))
            self._engine_names[name] = name_of_request(returned, name)
            self._running[name] = request

    def unfinished(self) -> dict[int, int]:
        """Rows in generation, and how many tokens each has got so far; without greedy responses."""
        running = self._running.items()
        return {request.row: len(self._seen(name)) for name, request in running if not request.greedy}

    def interrupt(self) -> list[Generation]:
        """Stop generating: what there is of all unfinished responses, possibly no token."""
        names = list(self._running)
        stopped = [self._end(name) for name in names]
        self.llm.llm_engine.abort_request(names)
        return stopped

    def _seen(self, name: str) -> Sequence[int]:
        """What there is of a response: the engine's own list, which grows."""
        if name in self._outputs:
            found: Sequence[int] = self._outputs[name].outputs[0].token_ids
            return found
        return self._scheduler.tokens(self._engine_names[name]) if self._scheduler else []

    def _log_probs(self, name: str) -> list[float]:
        """Of those tokens."""
        if self._scheduler:
            return self._scheduler.log_probs.pop(self._engine_names[name], [])
        if name not in self._outputs:
            return []
        completion = self._outputs[name].outputs[0]
        if hasattr(completion.logprobs, "logprobs"):  # flat
            return list(completion.logprobs.logprobs)
        return [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]

    def _end(self, name: str) -> Generation:
        """What there is of a response that goes no further."""
        request, tokens = self._running.pop(name), list(self._seen(name))
        log_probs = self._log_probs(name) if self._has_log_probs(request) else None
        assert log_probs is None or len(log_probs) == len(tokens), "each token has a log-prob"
        output = self._outputs.pop(name, None)
        text = output.outputs[0].text if output and self.cfg.sampling_config.detokenize else None
        del self._engine_names[name]
        return Generation(request.row, tokens, log_probs, text, request.greedy)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, given under their Hugging Face names, and forget all cached prefixes."""
        self.llm.collective_rpc(self._load_weights, args=(weights,))
        self.llm.reset_prefix_cache()

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """What of this rank's engine has not the bits that a new engine has after loading `weights`: names.

        While it is compared, the new engine's model takes as much memory as the running one.
        """
        (names,) = self.llm.collective_rpc(validation.differing_weights, args=(weights,))
        return names

    def sleep(self) -> None:
        """Give device memory (weights, KV cache) back."""
        if self.can_sleep:
            free = self._free_memory()
            self.llm.sleep(level=2)
            # what waking up took; before that, what became free, garbage among it that vLLM collects here
            self.asleep_bytes += self._woken_bytes or self.device.free_memory() - free
            self._woken_bytes = 0

    def wake_up(self, part: str) -> None:
        """Take memory for `part`: "weights" or, after those, "kv_cache"."""
        if self.can_sleep:
            free = self._free_memory()
            self.llm.wake_up(tags=[part])
            taken = free - self.device.free_memory()
            self._woken_bytes += taken
            self.asleep_bytes = 0 if part == "kv_cache" else self.asleep_bytes - taken

    def _free_memory(self) -> int:
        """With torch's cache, which after an update may be all there is: vLLM asks the device itself."""
        self.device.empty_cache()
        return self.device.free_memory()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Of an engine at work there is none; to look for it among all its objects takes a third of the time.

    Nor is it collected in what its driver does between two steps, as scoring: that is put off until the last one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _know_model_class(model_folder: str) -> None:
    """Have the model's class looked at here: vLLM would start a process for that, which takes as long as ours."""
    from vllm import ModelRegistry

    for architecture in read_json(Path(model_folder) / "config.json").get("architectures") or ():
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
