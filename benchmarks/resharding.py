"""Training weights on their way to rollout, beside a copy or collective of the same bytes, measured in the same run.

`python benchmarks/resharding.py [--device cuda] [--models qwen25_0b5 …] [--layouts one tp2 to_tp2 pp2] [--rollout]`

A consumer copies every tensor that it is given into memory of its own, as vLLM's loader does; with `--rollout` it is
vLLM itself, on every rank, in whose engine the weights are in place then. Beside it stands what no export can beat:
one copy of the weights; an all-gather, or a broadcast from each stage, of the same bytes in pieces of the bucket's
size and a copy of what arrived.
"""

from __future__ import annotations

import argparse
import itertools
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
import yaml
from records import ROOT, Record, cpu_name, publish

from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.select import make_device
from mindspeed_rl.resharding.export import Groups, export_hf
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import parameter_table
from mindspeed_rl.resharding.plan import ExportPlan, make_plan, planned_dtypes

LAYOUTS = {"one": (1, 1, 1, 1), "tp2": (2, 1, 1, 1), "to_tp2": (1, 1, 2, 2), "pp2": (1, 2, 1, 1)}  # TP, PP, DP; TP
REPEATS = 5
# of 7B; the limit is the aim
SUMMARY = {"one": ("reshard.h200_tp1_vs_copy", 3.0), "tp2": ("reshard.2gpu_vs_allgather", 2.0)}
MODEL_TYPES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}


def load_model(name: str) -> ModelConfig:
    """A preset."""
    path = ROOT / "configs" / "model" / f"{name}.yaml"
    return ModelConfig(**yaml.safe_load(path.read_text())[name])


def fastest(device: Any, work: Callable[[], None], group: bool) -> float:
    """Seconds of the fastest of some repetitions, after one more: the slowest rank's of each."""
    found = []
    for _ in range(REPEATS + 1):
        device.synchronize()
        if group:
            dist.barrier()
        start = time.perf_counter()
        work()
        device.synchronize()
        seconds = torch.tensor([time.perf_counter() - start], device=device.current(), dtype=torch.float64)
        if group:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(seconds.item())
    return min(found[1:])


def limit_of(device: Any, plan: ExportPlan, kept: dict[str, torch.Tensor], copied: bool = True) -> Callable[[], None]:
    """The plain copy or collectives of the same bytes, and a copy of what arrived unless not `copied`."""
    sources = {name: torch.empty_like(tensor) for name, tensor in kept.items()} if not plan.buckets else {}

    def copy() -> None:
        for name, tensor in kept.items():
            tensor.copy_(sources[name])

    if not plan.buckets:
        return copy
    total = sum(tensor.nbytes for tensor in kept.values())
    collective = plan.buckets[0].collectives[-1]
    piece = max(bucket.receive_bytes or bucket.send_bytes for bucket in plan.buckets)
    world, here = len(collective.ranks), device.current()
    part = piece // world if collective.way == "all_gather" else piece
    mine = torch.empty(part, dtype=torch.uint8, device=here)
    arrived = torch.empty(part * world, dtype=torch.uint8, device=here)
    target = torch.empty_like(arrived)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def move() -> None:
        for number in range(-(-total // piece)):
            if collective.way == "all_gather":
                gather(arrived, mine)
                if copied:
                    target.copy_(arrived)
            else:
                dist.broadcast(mine, collective.ranks[number % world])
                if copied:
                    target[: len(mine)].copy_(mine)

    return move


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """What vLLM reads of a model."""
    return {
        "architectures": [model.architecture],
        "model_type": MODEL_TYPES[model.architecture],
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rotary_base,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "eos_token_id": 0,
    }


def rollout_engine(model: ModelConfig, device: Any, folder: str, tp: int = 1, length: int = 1024) -> Any:
    """vLLM on this rank, or on `tp` neighbouring ones, with that model; `length`: tokens of a sequence."""
    from mindspeed_rl.engine.vllm.engine import VllmEngine

    Path(folder, "config.json").write_text(json.dumps(hf_config(model)))
    cfg = GenerateConfig(
        infer_tensor_parallel_size=tp,
        dtype="bfloat16",
        max_model_len=min(length, model.max_position_embeddings),
        max_num_seqs=8,
        enforce_eager=True,
        gpu_memory_utilization=0.5,
    )
    return VllmEngine(cfg, folder, device, seed=0, stop_tokens=[0])


def measure(
    rank: int, kind: str, model_name: str, layout_name: str, bucket_mb: float, rollout: bool, folder: str
) -> None:
    """One rank of one layout; rank 0 writes what it has found."""
    torch.set_num_threads(1)
    tp, pp, dp, infer_tp = LAYOUTS[layout_name]
    world = tp * pp * dp
    os.environ.update(RANK=str(rank), LOCAL_RANK="0" if kind == "cpu" else str(rank), WORLD_SIZE=str(world))
    device = make_device(kind)
    device.select(rank if kind != "cpu" else 0)
    dist.init_process_group(
        device.collectives_backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    model, cfg = load_model(model_name), MegatronConfig(bf16=True)
    layout, dtypes = WeightLayout.even(model, tp=tp, pp=pp, dp=dp), planned_dtypes(cfg, model)
    plan = make_plan(model, dtypes, layout, rank, int(bucket_mb * 2**20))
    own = str(Path(folder, f"model_{rank}"))
    Path(own).mkdir()
    engine = rollout_engine(model, device, own, infer_tp) if rollout else None
    local = {
        name: torch.randn(parameter.local_shape(tp), dtype=dtypes[name], device=device.current())
        for name, parameter in plan.owned.items()
    }
    kept = {
        name: torch.empty(shape, dtype=dtypes[parameter.name], device=device.current())
        for parameter in parameter_table(model)
        for name, shape in zip(parameter.hf_names, parameter.hf_shapes, strict=True)
    }
    group = dist.group.WORLD if tp * pp > 1 else None  # data-parallel ranks have all that they need
    groups = Groups(pipeline=group if pp > 1 else None, tensor=group if tp > 1 else None, replica=group)

    def export() -> None:
        weights = export_hf(local, plan, groups, device)
        if engine is not None:
            engine.update_weights(weights)
            return
        for name, tensor in weights:
            kept[name].copy_(tensor)

    seconds = fastest(device, export, world > 1)
    device.reset_peak_memory()
    before = device.memory_allocated()
    export()
    extra = device.max_memory_allocated() - before
    limit, bare = (fastest(device, limit_of(device, plan, kept, copied), world > 1) for copied in (True, False))
    if rank == 0:
        total = sum(tensor.nbytes for tensor in kept.values())
        Path(folder, "found").write_text(f"{total} {seconds} {limit} {bare} {plan.peak_bytes} {extra}")
    dist.barrier()
    os._exit(0)  # vLLM's threads must not hold up the end


def main() -> None:
    """Run and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "npu"])
    parser.add_argument("--models", nargs="+", default=["qwen25_0b5"], help="presets")
    parser.add_argument("--bucket-mb", type=float, default=GenerateConfig().resharding_bucket_mb)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--rollout", action="store_true", help="vLLM takes the weights, instead of plain copies")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    records = []
    for model, name in itertools.product(args.models, args.layouts):
        tp, pp, dp, infer_tp = LAYOUTS[name]
        with tempfile.TemporaryDirectory() as folder:
            arguments = (args.device, model, name, args.bucket_mb, args.rollout, folder)
            mp.spawn(measure, arguments, nprocs=tp * pp * dp)
            total, seconds, limit, bare, planned, extra = map(float, Path(folder, "found").read_text().split())
        what = f"{model}, bfloat16, TP {tp}, PP {pp}, DP {dp} to TP {infer_tp}{', into vLLM' if args.rollout else ''}"
        beside = "one copy" if tp * pp == 1 else "all-gather and copy" if tp > 1 else "broadcasts and copy"
        metric = f"reshard.{model}_{name}"
        records += [
            Record(f"{metric}_seconds", seconds, "s", limit, note=f"{what}; limit: {beside} of the same bytes"),
            Record(f"{metric}_bandwidth", total / seconds / 1e9, "GB/s", total / limit / 1e9, note=what),
            Record(f"{metric}_vs_limit", seconds / limit, "times", 1.0, note=what),
            Record(
                f"{metric}_extra_memory",
                extra / 2**20,
                "MiB",
                planned / 2**20,
                note=f"{what}; buckets of {args.bucket_mb:g} MiB; limit: what the plan states",
            ),
        ]
        if tp * pp > 1:
            note = f"{what}; beside {beside.removesuffix(' and copy')} alone"
            records.append(Record(f"{metric}_vs_collective", seconds / bare, "times", 1.0, note=note))
        if args.device == "cuda" and name in SUMMARY and model == "qwen25_7b":
            metric, aim = SUMMARY[name]
            records.append(Record(metric, seconds / (limit if name == "one" else bare), "times", aim, note=what))
    hardware = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    kind = f"resharding{'_rollout' if args.rollout else ''}-{args.device}"
    publish(kind, records, hardware, keep_others=True)


if __name__ == "__main__":
    main()
