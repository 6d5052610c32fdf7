"""What `--dry-run` says of an update's memory, beside the largest that a rank had in use: `[--device cuda]`.

Random weights of a preset's shape, and one step of the optimizer (a second one is measured) on sequences of full
length; on CUDA scoring as well. On CPU what is in use is resident memory beyond what the libraries take, which keep
what an update had for scoring.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import Record, cpu_name, publish

from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.memory import GIB, estimate_memory, pass_bytes
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.select import make_device
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.engine.megatron.bootstrap import prepare
from mindspeed_rl.resharding.names import parameter_table
from mindspeed_rl.types import RolloutBatch

RECOMPUTED = (
    "actor_config.recompute_granularity=full",
    "actor_config.recompute_method=uniform",
    "actor_config.recompute_num_layers=1",
)


def _sizes(sequences: int) -> tuple[str, ...]:
    """Of the passes of training and of scoring."""
    keys = ("actor_config.micro_batch_size", "rl_config.ref_forward_micro_batch_size")
    return (*(f"{key}={sequences}" for key in keys), "rl_config.init_kl_coef=0.001")


TP2 = ("actor_config.tensor_model_parallel_size=2", "actor_config.sequence_parallel=true")
# device -> preset, sequence length, layouts: number of ranks and overrides
CASES: dict[str, tuple[str, int, dict[str, tuple[int, tuple[str, ...]]]]] = {
    "cpu": (
        "qwen25_0b5",
        256,
        {
            "one rank": (1, _sizes(2)),
            "DP 2, recomputed": (2, (*_sizes(4), *RECOMPUTED)),
            "TP 2": (2, (*_sizes(4), *TP2)),
            "PP 2": (2, (*_sizes(2), "actor_config.pipeline_model_parallel_size=2")),
        },
    ),
    "cuda": (
        "qwen25_1b5",
        1024,
        {
            "one rank": (1, _sizes(8)),
            "one rank, recomputed": (1, (*_sizes(16), *RECOMPUTED)),
            "one rank, selective": (1, (*_sizes(8), "actor_config.recompute_granularity=selective")),
        },
    ),
}
PROMPT = 16  # tokens


class _Slice:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor[index]


class RandomWeights:
    """Reads like `HFWeights`; every tensor is made when it is asked for."""

    def __init__(self, model: ModelConfig):
        self.shapes = {
            name: shape
            for parameter in parameter_table(model)
            for name, shape in zip(parameter.hf_names, parameter.hf_shapes, strict=True)
        }
        self.names = list(self.shapes)

    def slice(self, name: str) -> _Slice:
        """A tensor of which parts can be read."""
        shape = self.shapes[name]
        return _Slice(torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape))


def configuration(device: str, world: int, overrides: tuple[str, ...]) -> Config:
    """A run of two micro-batches a rank and stage."""
    preset, length, _ = CASES[device]
    cfg, _ = load_config(
        "grpo_trainer_tiny_cpu",
        [
            f"model={preset}",
            f"megatron_training.model={preset}",
            f"actor_config.model={preset}",
            f"device={device}",
            "actor_config.load=unused",
            f"megatron_training.seq_length={length}",
            f"megatron_training.bf16={str(device != 'cpu').lower()}",
            f"rl_config.actor_resource.num_npus={world}",
            f"rl_config.max_prompt_length={PROMPT}",
            f"generate_config.sampling_config.max_tokens={length - PROMPT}",
            f"generate_config.max_model_len={length}",
            *overrides,
        ],
    )
    return cfg


def measure(rank: int, device_name: str, world: int, overrides: tuple[str, ...], folder: str) -> None:
    """One rank; writes the most bytes that it had in use."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS=str(max(1, 2 // world)))
    torch.set_num_threads(max(1, 2 // world))
    device = make_device(device_name)
    cfg = configuration(device_name, world, overrides)
    prepare(device, cfg.actor)
    device.select(rank if device_name != "cpu" else 0)
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    dist.init_process_group(
        device.collectives_backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    model, layout = resolve_model(cfg), derive_layout(cfg)
    initialize_parallel_state(cfg.actor)
    before = device.memory_allocated()
    weights: Any = RandomWeights(model)
    engine = MegatronEngine(cfg.actor, model, device, 10, weights, with_reference=False)
    size, length = cfg.actor.micro_batch_size, cfg.actor.seq_length
    count = size * 2 * layout.pp
    batch = RolloutBatch(
        [torch.randint(1, 1000, (PROMPT,)) for _ in range(count)],
        [torch.randint(1, 1000, (length - PROMPT,)) for _ in range(count)],
        {},
    )
    passes = [list(range(first, first + size)) for first in range(0, count, size)]

    def loss(_: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
        assert outputs.log_probs is not None
        assert outputs.entropy is not None
        return -(outputs.log_probs.mean() + 0.01 * outputs.entropy.mean()), MetricSet()

    engine.train_mini_batch(batch, loss, passes, 1.0, entropy=True)  # the optimizer's state is made here
    device.reset_peak_memory()
    engine.train_mini_batch(batch, loss, passes, 1.0, entropy=True)
    peaks = [device.max_memory_allocated() - before]
    if device_name != "cpu":
        device.reset_peak_memory()
        engine.score(batch, passes, 1.0)
        peaks.append(device.max_memory_allocated() - before)
    Path(folder, str(rank)).write_text(json.dumps(peaks))
    dist.barrier()


def main() -> None:
    """Run and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=list(CASES))
    device = parser.parse_args().device
    preset, length, layouts = CASES[device]
    records = []
    for name, (world, overrides) in layouts.items():
        cfg = configuration(device, world, overrides)
        estimate = estimate_memory(cfg, resolve_model(cfg), derive_layout(cfg))
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (device, world, overrides, folder), nprocs=world)
            ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
        state = estimate.weights + estimate.gradients + estimate.optimizer
        a_pass = pass_bytes(cfg, resolve_model(cfg), derive_layout(cfg), "reference")
        estimated = {"update": estimate.training, "scoring": state + a_pass}
        note = (
            f"{preset}, {name}, micro-batches of {cfg.actor.micro_batch_size} x {length} tokens: "
            f"weights {estimate.weights / GIB:.2f}, gradients {estimate.gradients / GIB:.2f}, optimizer "
            f"{estimate.optimizer / GIB:.2f}, activations {estimate.activations / GIB:.2f}, "
            f"logits {estimate.logits / GIB:.2f}, a pass {a_pass / GIB:.2f}"
        )
        for stage, peaks in zip(estimated, zip(*ranks, strict=True), strict=False):
            error = estimated[stage] / max(peaks) - 1
            records += [
                Record(f"memory.{stage}_peak", max(peaks) / GIB, "GiB", estimated[stage] / GIB, note=note),
                Record("memory.estimate_error", error, "", 0.0, note=f"{preset}, {name}, {stage}"),
            ]
    worst = max((abs(r.value) for r in records if r.metric == "memory.estimate_error"), default=0.0)
    records.append(Record("memory.max_estimate_error", worst, "", 0.15, note="limit: what is allowed"))
    publish(f"memory-{device}", records, cpu_name() if device == "cpu" else torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
