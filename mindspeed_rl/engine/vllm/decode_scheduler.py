"""A scheduler for vLLM's engine that spends little on a request that only decodes.

With a thousand sequences a decode step takes an H200 11 ms, and Python 25 ms for what vLLM does beside it: for each
request and step its scheduler asks the cache for a slot, looks for what there might be (images, grammars, drafts,
adapters), and makes an output, which is then appended to those before. Of that, rollout needs little: one token in 16
needs a new block of the cache, and nobody reads a response before it has ended.

Written for vLLM 0.25, whose own scheduler takes every step that may have parts of prompts in it, or a cache that is
nearly full.
Requests are as `VllmEngine` makes them: text prompts, no grammar, no adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus


class DecodeScheduler(AsyncScheduler):
    """See `vllm.config.SchedulerConfig.scheduler_cls`.

    Attributes:
        is_used: whether it does anything; else (several kinds of cache, another model runner) it is vLLM's own. If it
            does, the first output of a request is the last one, with all tokens and no log-probs.
        log_probs: by the engine's name of a request, one of each token so far; whoever wants them takes them out.
    """

    skipped_waiting: Any  # later versions have no such queue

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.log_probs: dict[str, list[float]] = {}
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._cache = managers[0]
        self.is_used = (
            self.use_v2_model_runner
            and [type(manager) for manager in managers] == [FullAttentionManager]
            and self.dcp_world_size == 1
            and not (self.use_pp or self.lora_config or self.num_spec_tokens or self.connector or self.ec_connector)
        )

    def tokens(self, name: str) -> Sequence[int]:
        """What a request that has not ended has got so far: its own list."""
        found: Sequence[int] = self.requests[name]._output_token_ids
        return found

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """The next step: one token of every running request, or what vLLM makes of prompts that there is room for."""
        if (
            not self.is_used
            or ((self.waiting or self.skipped_waiting) and len(self.running) < self.max_num_running_reqs)
            or len(self.running) > self.max_num_scheduled_tokens
            or len(self.running) > self._cache.block_pool.get_num_free_blocks()
            or any(request.is_prefill_chunk for request in self.running)
        ):
            return super().schedule(throttle_prefills)
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        step, longest, size = self.current_step, self.max_model_len - 1, self._cache.block_size
        decoding = CachedRequestData.make_empty()
        for request in self.running:
            computed, unknown = request.num_computed_tokens, request.num_output_placeholders
            is_last = unknown and computed + 2 - unknown >= request.num_prompt_tokens + request.max_tokens
            if is_last or computed >= longest or step < request.next_decode_eligible_step:
                continue  # its last token is on its way
            name, new = request.request_id, None
            if computed % size == 0 and (blocks := self._cache.allocate_new_blocks(name, computed + 1, computed + 1)):
                new = ([block.block_id for block in blocks],)
            decoding.req_ids.append(name)
            decoding.new_block_ids.append(new)
            decoding.num_computed_tokens.append(computed)
            decoding.num_output_tokens.append(len(request._output_token_ids) + unknown)
            request.num_computed_tokens = computed + 1
            request.num_output_placeholders = unknown + 1
            request.next_decode_eligible_step = step + 1
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=decoding,
            num_scheduled_tokens=dict.fromkeys(decoding.req_ids, 1),
            total_num_scheduled_tokens=len(decoding.req_ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self.kv_cache_manager.take_new_block_ids() if self.needs_kv_cache_zeroing else None,
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        """Append what was sampled to its requests; outputs of those that have ended."""
        if not self.is_used:
            return super().update_from_output(scheduler_output, model_runner_output)
        sampled, places = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        log_probs = model_runner_output.logprobs and model_runner_output.logprobs.logprobs[:, 0].tolist()
        ended, outputs = set(), []
        for name in scheduler_output.num_scheduled_tokens if sampled else ():
            place = places[name]
            request: Any = self.requests.get(name)
            if request is None or not sampled[place]:
                continue  # aborted meanwhile, or not all of its prompt has been seen
            if request.async_tokens_to_discard:
                request.async_tokens_to_discard -= 1
                continue
            (token,) = sampled[place]
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            request.num_output_placeholders -= 1
            if len(request._all_token_ids) % self._cache.block_size == 0:
                request.update_block_hashes()
            if request.sampling_params.num_logprobs is not None:
                self.log_probs.setdefault(name, []).append(log_probs[place])
            if (end := self._end(request, token)) is not None:
                request.status = end
                ended.add(request)
                output = EngineCoreOutput(name, list(request._output_token_ids))
                output.finish_reason, output.stop_reason = request.get_finished_reason(), request.stop_reason
                outputs.append(output)
                self._free_request(request)
        if ended:
            preempted = ended.difference(self.running)  # while their last tokens were computed
            self.running = [request for request in self.running if request not in ended]
            if preempted:
                self.waiting.remove_requests(preempted)
        return {0: EngineCoreOutputs(outputs=outputs)}

    def _end(self, request: Any, token: int) -> RequestStatus | None:
        """How its newest token ends a request; None: it does not."""
        params = request.sampling_params
        if token == params.eos_token_id:
            return RequestStatus.FINISHED_STOPPED
        if token in params.stop_token_ids:
            request.stop_reason = token
            return RequestStatus.FINISHED_STOPPED
        if len(request._output_token_ids) >= request.max_tokens or request.num_tokens >= self.max_model_len:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None
