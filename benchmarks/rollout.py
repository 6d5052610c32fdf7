"""Tokens that vLLM generates in the training process, and what its own scheduler makes of the same: on one GPU.

`python benchmarks/rollout.py [--model qwen25_1b5] [--sequences 1024] [--running 512] [--prompt 128] [--response 512]`

Random weights and prompts, responses of full length, with log-probs. Beside it stand vLLM's own scheduler, and what
the device alone would take: the time of its kernels in a step, seen half way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from records import ROOT, Record, publish
from resharding import hf_config, load_model

from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.device.select import make_device
from mindspeed_rl.engine.base import GenerationRequest

REPEATS = 3
CHECKED = 64  # sequences whose likeliest continuations both schedulers must give alike


def engine(args: argparse.Namespace, folder: str) -> Any:
    """vLLM on this process's device."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29501")
    device = make_device("cuda")
    device.select(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    from mindspeed_rl.engine.vllm import cuda
    from mindspeed_rl.engine.vllm.engine import VllmEngine

    if args.scheduler == "vllm":
        cuda.SCHEDULER_VERSION = "none"
    Path(folder, "config.json").write_text(json.dumps(hf_config(load_model(args.model))))
    cfg = GenerateConfig(
        dtype="bfloat16",
        max_model_len=args.prompt + args.response,
        max_num_seqs=args.running or args.sequences,
        max_num_batched_tokens=16384,
        enforce_eager=False,
        gpu_memory_utilization=0.8,
        sampling_config={"max_tokens": args.response, "ignore_eos": True},
    )
    return VllmEngine(cfg, folder, device, seed=0, stop_tokens=[0], interruptible=False)


def profiled(rollout: Any, requests: list[GenerationRequest], first: int, steps: int) -> float:
    """Seconds of the device's kernels in a step, of those after the first ones."""
    running = rollout.generate(requests)
    for _ in range(first):
        next(running)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            next(running)
        torch.cuda.synchronize()
    for _ in running:
        pass
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / steps


def measure(args: argparse.Namespace) -> None:
    """One scheduler, in this process; writes what it has found."""
    folder = str(args.output.parent)
    rollout = engine(args, folder)
    prompts = torch.randint(10, 10_000, (args.sequences, args.prompt), generator=torch.Generator().manual_seed(0))
    requests = [GenerationRequest(row, prompt, None) for row, prompt in enumerate(prompts)]
    likeliest = [GenerationRequest(row, prompts[row], None, greedy=True) for row in range(CHECKED)]
    greedy = {g.row: g.tokens for step in rollout.generate(likeliest) for g in step}
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        tokens = sum(len(generation.tokens) for step in rollout.generate(requests) for generation in step)
        seconds.append(time.perf_counter() - start)
        assert tokens == args.sequences * args.response
    found = {
        "seconds": sorted(seconds)[REPEATS // 2],
        "kernels": profiled(rollout, requests, args.response // 2, 10),
        "greedy": [greedy[row] for row in range(CHECKED)],
    }
    args.output.write_text(json.dumps(found))
    os._exit(0)  # vLLM and NCCL take their time to end


def main() -> None:
    """Both schedulers, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen25_1b5")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--running", type=int, help="of the sequences, how many at once; all if not given")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--scheduler", choices=["ours", "vllm"], help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.scheduler:
        measure(args)
    found = {}
    for scheduler in ("vllm", "ours"):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "found.json")
            more = [f"--scheduler={scheduler}", f"--output={output}"]
            subprocess.run([sys.executable, __file__, *sys.argv[1:], *more], cwd=ROOT, check=True)
            found[scheduler] = json.loads(output.read_text())
    assert found["ours"]["greedy"] == found["vllm"]["greedy"], "both schedulers have the same tokens generated"
    total = args.sequences * args.response
    rates = {scheduler: total / each["seconds"] for scheduler, each in found.items()}
    running = min(args.running or args.sequences, args.sequences)
    limit = running / found["ours"]["kernels"]
    at_once = "" if running == args.sequences else f", {running} at once"
    shape = f"{args.model}, {args.sequences} x {args.prompt}+{args.response}{at_once}, with log-probs"
    note = f"{shape}; median of {REPEATS}; peer: vLLM's own scheduler; limit: the kernels of a step half way, alone"
    record = Record(
        "cuda.rollout_tokens_per_s", rates["ours"], "tokens/s", limit=limit, peer=rates["vllm"], note=note
    )
    publish("rollout-cuda", [record], torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
