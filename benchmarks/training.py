"""Tokens a second of training and scoring on one GPU, beside what its matrix products alone would allow.

`python benchmarks/training.py`

Qwen2.5-1.5B's shape with random weights in bfloat16, distributed optimizer, sequences of 256 + 768 tokens, 16 of them
a micro-batch and two micro-batches a step. A step's limit is the rate of large matrix products, measured beside it,
over 6 N operations a token, N parameters; of scoring, over 2 N.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from memory import RECOMPUTED, RandomWeights, configuration
from records import Record, publish

from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.memory import estimate_memory
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.select import make_device
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.engine.megatron.bootstrap import prepare
from mindspeed_rl.types import RolloutBatch

PROMPT, LENGTH, MICRO_BATCH, REPEATS = 256, 1024, 16, 5
SIZE = 8192  # of the matrices
CASES: dict[str, tuple[str, ...]] = {
    "nothing recomputed": (),
    "18 layers recomputed": (
        *RECOMPUTED[:1],
        "actor_config.recompute_method=block",
        "actor_config.recompute_num_layers=18",
    ),
}


def seconds(work: Callable[[], Any]) -> float:
    """Mean of several runs, after two that do not count: kernels are compiled in both."""
    work()
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS


def configured(overrides: tuple[str, ...]) -> Config:
    """One GPU, sequences of full length."""
    return configuration("cuda", 1, (f"actor_config.micro_batch_size={MICRO_BATCH}", *overrides))


def matmul_rate() -> float:
    """FLOP/s of large matrix products."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 20 * 2 * SIZE**3 / seconds(lambda: [a @ b for _ in range(20)])


def loss(_: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
    """Of the log-probs alone."""
    assert outputs.log_probs is not None
    return -outputs.log_probs.mean(), MetricSet()


def measure(_: int, name: str, folder: str) -> None:
    """One case, in a process of its own: what Megatron keeps of an engine would count for the next one."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    device = make_device("cuda")
    cfg = configured(CASES[name])
    prepare(device, cfg.actor)
    device.select(0)
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    rate = matmul_rate()
    model = resolve_model(cfg)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    initialize_parallel_state(cfg.actor)
    weights: Any = RandomWeights(model)
    engine = MegatronEngine(cfg.actor, model, device, 10, weights, with_reference=False)

    count = 2 * MICRO_BATCH
    prompts, responses = (torch.randint(1, 1000, (count, length)) for length in (PROMPT, LENGTH - PROMPT))
    batch = RolloutBatch(list(prompts), list(responses), {})
    passes = [list(range(first, first + MICRO_BATCH)) for first in (0, MICRO_BATCH)]
    device.reset_peak_memory()
    training = seconds(lambda: engine.train_mini_batch(batch, loss, passes, 1.0, entropy=False))
    peak = device.max_memory_allocated()
    scoring = seconds(lambda: engine.score(batch, passes, 1.0))
    found = {"rate": rate, "parameters": model.num_parameters, "training": training, "scoring": scoring, "peak": peak}
    Path(folder, "found.json").write_text(json.dumps(found))
    os._exit(0)  # NCCL takes its time to end


def main() -> None:
    """Run and publish."""
    records, tokens = [], 2 * MICRO_BATCH * LENGTH
    for name, overrides in CASES.items():
        cfg = configured(overrides)
        estimate = estimate_memory(cfg, resolve_model(cfg), derive_layout(cfg))
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (name, folder))
            found = json.loads(Path(folder, "found.json").read_text())
        what = f"qwen25_1b5, {MICRO_BATCH} x {LENGTH} tokens a micro-batch"
        limit, suffix = found["rate"] / 6 / found["parameters"], "_recomputed" if overrides else ""
        note = f"{what}, {name}; products of {SIZE} cubed make {found['rate'] / 1e12:.0f} TFLOP/s"
        rates = {"train": (tokens / found["training"], limit), "forward": (tokens / found["scoring"], 3 * limit)}
        records += [
            *(
                Record(f"cuda.{n}_tokens_per_s{suffix}", rate, "tokens/s", most, note=note)
                for n, (rate, most) in rates.items()
            ),
            Record(f"cuda.peak_gb_16k{suffix}", found["peak"] / 1e9, "GB", note=f"{what}, {name}"),
            Record(f"cuda.estimated_gb_16k{suffix}", estimate.training / 1e9, "GB", note=f"{what}, {name}"),
        ]
    publish("training-cuda", records, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
