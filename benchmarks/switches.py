"""Many switches between training and rollout in one process: how long one takes, and whether anything stays behind.

`python benchmarks/switches.py [--device cuda] [--model qwen25_1b5] [--switches 200]`

Each cycle wakes vLLM up, hands it the weights, generates a few tokens, puts it to sleep (level 2) and takes a step of
the optimizer; the training state stays on the device. Memory is what the device has lent to all processes, so what
vLLM takes past torch counts; on CPU it is that of this process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from memory import RandomWeights, configuration
from records import Record, cpu_name, publish
from resharding import rollout_engine
from training import loss

from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.device.select import make_device
from mindspeed_rl.engine.base import GenerationRequest
from mindspeed_rl.engine.megatron.bootstrap import prepare
from mindspeed_rl.types import RolloutBatch

PROMPT, RESPONSE, SEQUENCES = 16, 16, 8
SETTLED = 10  # cycles until caches have their size
BUCKET_BYTES = 256 << 20


def in_use(device: Any) -> tuple[float, float]:
    """MiB on the device, and of this process on the host."""
    host = psutil.Process().memory_info().rss / 2**20
    if device.name == "cpu":
        return host, host
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20, host


class Cycle:
    """Both engines, on the same device."""

    def __init__(self, kind: str, preset: str, folder: str):
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29502")
        self.device: Any = make_device(kind)
        presets = (f"model={preset}", f"megatron_training.model={preset}", f"actor_config.model={preset}")
        length = PROMPT + RESPONSE
        cfg = configuration(
            kind,
            1,
            (
                *presets,
                f"megatron_training.seq_length={length}",
                f"generate_config.sampling_config.max_tokens={RESPONSE}",
                f"generate_config.max_model_len={length}",
                f"actor_config.micro_batch_size={SEQUENCES}",
            ),
        )
        prepare(self.device, cfg.actor)
        self.device.select(0)
        dist.init_process_group(
            self.device.collectives_backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

        model = resolve_model(cfg)
        self.rollout = rollout_engine(model, self.device, folder, length=length)
        self.rollout.sleep()
        initialize_parallel_state(cfg.actor)
        weights: Any = RandomWeights(model)
        self.training = MegatronEngine(cfg.actor, model, self.device, 1000, weights, with_reference=False)
        self.nbytes = model.num_parameters * 2

    def run(self) -> tuple[float, float]:
        """Seconds of the switch there and back, and of handing over the weights alone."""
        start = time.perf_counter()
        self.rollout.wake_up("weights")
        self.device.synchronize()
        pushed = time.perf_counter()
        self.rollout.update_weights(self.training.export_weights(BUCKET_BYTES))
        self.device.synchronize()
        push = time.perf_counter() - pushed
        self.rollout.wake_up("kv_cache")
        self.device.synchronize()
        there = time.perf_counter() - start
        prompts = torch.randint(1, 15, (SEQUENCES, PROMPT))
        requests = [GenerationRequest(row, prompt, None) for row, prompt in enumerate(prompts)]
        found = {each.row: each.tokens for step in self.rollout.generate(requests) for each in step}
        start = time.perf_counter()
        self.rollout.sleep()
        self.device.synchronize()
        back = time.perf_counter() - start
        batch = RolloutBatch(list(prompts), [torch.tensor(found[row]) for row in range(SEQUENCES)], {})
        self.training.train_mini_batch(batch, loss, [list(range(SEQUENCES))], 1.0, entropy=False)
        return there + back, push


def main() -> None:
    """Run and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="qwen25_1b5", help="a preset")
    parser.add_argument("--switches", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cycle = Cycle(args.device, args.model, folder)
        seconds, memory = [], []
        for _ in range(args.switches):
            seconds.append(cycle.run())
            memory.append(in_use(cycle.device))
        switches, pushes = zip(*seconds[SETTLED:], strict=True)
        what = f"{args.model}, {args.switches} switches"
        copy = torch.empty(cycle.nbytes, dtype=torch.uint8, device=cycle.device.current())
        other = torch.empty_like(copy)
        start = time.perf_counter()
        for _ in range(10):
            other.copy_(copy)
        cycle.device.synchronize()
        limit = (time.perf_counter() - start) / 10
        records = [
            Record(
                "cuda.weight_push_ms", 1e3 * statistics.median(pushes), "ms", 1e3 * limit, note=f"{what}; one copy"
            ),
            Record("cuda.switch_ms", 1e3 * statistics.median(switches), "ms", note=f"{what}; there and back"),
        ]
        for place, name in enumerate(("device", "host")):
            early = max(each[place] for each in memory[SETTLED : 2 * SETTLED])
            late = max(each[place] for each in memory[-SETTLED:])
            note = f"{what}; most of the last {SETTLED} beside most of cycles {SETTLED} to {2 * SETTLED}"
            records.append(Record(f"cuda.switch_{name}_growth_mib", late - early, "MiB", 0.0, note=note))
        on_gpu = args.device == "cuda"
        publish("switches-cuda", records, torch.cuda.get_device_name() if on_gpu else cpu_name(), write=on_gpu)
    os._exit(0)  # vLLM and NCCL take their time to end


if __name__ == "__main__":
    main()
