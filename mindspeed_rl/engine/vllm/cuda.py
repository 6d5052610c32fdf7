"""vLLM on CUDA: a graph for every batch size that decodes, and a scheduler that takes little time for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_rl.config.generate import GenerateConfig

if TYPE_CHECKING:
    from mindspeed_rl.engine.vllm.decode_scheduler import DecodeScheduler

# tokens of a step: for no more has vLLM graphs of its own accord
DEFAULT_CAPTURE_SIZE = 512
# of vLLM, whose scheduler ours derives from
SCHEDULER_VERSION = "0.25."


def arguments(cfg: GenerateConfig, interruptible: bool) -> dict[str, Any]:
    """Of the engine. Ours schedules unless an interrupted response may have to be text."""
    import vllm

    found: dict[str, Any] = {}
    if not cfg.enforce_eager:
        found["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(cfg.max_num_seqs)}
    if vllm.__version__.startswith(SCHEDULER_VERSION) and not (interruptible and cfg.sampling_config.detokenize):
        from mindspeed_rl.engine.vllm.decode_scheduler import DecodeScheduler

        found |= {"scheduler_cls": DecodeScheduler, "async_scheduling": True}
    return found


def capture_sizes(sequences: int) -> list[int]:
    """Of batches that get a graph: vLLM's own, further on if more sequences decode at once, and all of these.

    A batch is padded to the next size, but never beyond all sequences: a full batch must have a size of its own.
    """
    most = max(sequences, min(2 * sequences, DEFAULT_CAPTURE_SIZE))  # larger ones have parts of prompts in them
    own = (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16))
    return sorted({*(size for size in own if size <= most), sequences})


def decode_scheduler(llm: Any) -> DecodeScheduler | None:
    """The engine's scheduler, if it is ours and does something."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler if getattr(scheduler, "is_used", False) else None
