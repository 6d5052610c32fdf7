"""The step of `benchmarks/step.py` with TRL's GRPOTrainer and vLLM in the same process: run by `compare.py`.

Needs `trl`, `accelerate` and `datasets` beside vLLM. What is done alike: model, prompts, 8 responses of full length
for each, KL to a reference of weight 0.001, one update of all samples a step, bfloat16, vLLM with sleep mode and as
much of the memory, no recomputation. What is TRL's own: attention by torch (`sdpa`), as no flash attention is there,
and weights, gradients and Adam's moments in bfloat16, where ours are float32 beside the weights.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
os.environ.setdefault("MASTER_PORT", "29503")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import work_parser

MICRO_BATCH = 16  # sequences; more did not fit with gradients and logits of all tokens


class Clock(TrainerCallback):
    """Seconds of every step and of its stages; what a stage calls that is watched itself does not count for it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._stages: dict[str, float] = {}
        self._inner: list[float] = []  # seconds of what those now at work have called
        self._start = 0.0

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Count the time of a method."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._inner.append(0.0)
            found = method(*given, **named)
            torch.cuda.synchronize()
            whole = time.perf_counter() - start
            self._stages[stage] = self._stages.get(stage, 0.0) + whole - self._inner.pop()
            if self._inner:
                self._inner[-1] += whole
            return found

        setattr(owner, name, timed)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """See `TrainerCallback`."""
        torch.cuda.synchronize()
        self._start, self._stages = time.perf_counter(), {}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """See `TrainerCallback`."""
        torch.cuda.synchronize()
        whole = time.perf_counter() - self._start
        self.steps.append({"step_s": whole, **self._stages, "update_s": whole - sum(self._stages.values())})


def parity(completions: list[str], **_: Any) -> list[float]:
    """The same reward as in `step.py`."""
    return [float(len(completion) % 2) for completion in completions]


def main() -> None:
    """Run; writes what it has found."""
    args = work_parser(__doc__).parse_args()
    rows = [json.loads(line) for line in (args.folder / "data.jsonl").read_text().splitlines()]
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in rows * args.steps])
    model = str(args.folder / "model")
    settings = GRPOConfig(
        output_dir=str(args.folder / "trl"),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.memory,
        vllm_enable_sleep_mode=True,
        num_generations=args.samples,
        max_completion_length=args.response,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=len(rows) * args.samples // MICRO_BATCH,
        max_steps=args.steps,
        beta=0.001,
        learning_rate=1e-6,
        temperature=1.0,
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        vllm_importance_sampling_correction=False,  # whose old log-probs would take a pass more
        generation_kwargs={"ignore_eos": True, "min_tokens": args.response},
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},
    )
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    trainer = GRPOTrainer(
        model=model, reward_funcs=parity, args=settings, train_dataset=prompts, processing_class=tokenizer
    )
    clock = Clock()
    clock.watch(trainer, "_generate_and_score_completions", "scoring_s")
    clock.watch(trainer.vllm_generation, "generate", "rollout_s")
    clock.watch(trainer.vllm_generation, "sync_weights", "switch_s")
    for name in ("wake_up", "sleep"):
        clock.watch(trainer.vllm_generation.llm, name, "switch_s")
    trainer.add_callback(clock)
    trainer.train()
    args.output.write_text(json.dumps(clock.steps))
    os._exit(0)


if __name__ == "__main__":
    main()
