"""The same step here and with TRL, one after the other on one GPU: `python benchmarks/peers/compare.py [--steps 4]`.

See `trl_grpo.py` for what is alike and what is not. verl is not among them: it could not be installed where this ran.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from records import Record, publish, train
from step import CONFIG, PROMPT, RESPONSE, SAMPLES, SWITCH, VERIFIER, make_model, make_prompts, overrides

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model

COMPILED = 2  # steps that do not count
STAGES: dict[str, tuple[str, ...]] = {
    "step_s": ("timing/all",),
    "rollout_s": ("timing/rollout",),
    "scoring_s": ("timing/reference_model",),
    "update_s": ("timing/update",),
    "switch_s": SWITCH,
}


class DeviceMemory:
    """The most bytes that all processes together had taken of the first GPU, looked at ten times a second."""

    def __enter__(self) -> DeviceMemory:
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peak = max(self.peak, torch.cuda.device_memory_used())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def main() -> None:
    """Run both and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = overrides(args.prompts, args.steps, folder)
        (folder / "verifier.py").write_text(VERIFIER)
        make_prompts(args.prompts, folder / "data.jsonl")
        cfg, _ = load_config(CONFIG, settings)
        make_model(resolve_model(cfg), folder / "model")
        with DeviceMemory() as memory:
            own = train(CONFIG, folder / "out", *settings)[COMPILED:]
        ours = {
            stage: statistics.median(sum(step.get(key, 0.0) for key in keys) for step in own)
            for stage, keys in STAGES.items()
        }
        with DeviceMemory() as peer_memory:
            trl = run_trl(folder, args.steps, cfg.generate_config.gpu_memory_utilization)
    tokens, what = args.prompts * SAMPLES * (PROMPT + RESPONSE), f"{args.prompts} x {SAMPLES} x {PROMPT}+{RESPONSE}"
    note = f"{cfg.actor.model}, {what} tokens; median of the steps after {COMPILED}; peer: TRL"
    records = [
        Record("peers.trl_step_ratio", trl["step_s"] / ours["step_s"], "times", note=note),
        Record("peers.tokens_per_s", tokens / ours["step_s"], "tokens/s", peer=tokens / trl["step_s"], note=note),
        *(Record(f"peers.{stage}", ours[stage], "s", peer=trl[stage], note=note) for stage in STAGES),
        Record(
            "peers.peak_gb", memory.peak / 1e9, "GB", peer=peer_memory.peak / 1e9, note=f"{note}; taken, caches too"
        ),
    ]
    publish("peers-cuda", records, torch.cuda.get_device_name())


def run_trl(folder: Path, steps: int, memory: float) -> dict[str, float]:
    """Medians of its stages."""
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("trl is not installed (it needs accelerate and datasets, too)")
    output = folder / "trl.json"
    numbers = {"samples": SAMPLES, "response": RESPONSE, "steps": steps, "memory": memory}
    more = [f"--{key}={value}" for key, value in numbers.items()]
    script = Path(__file__).with_name("trl_grpo.py")
    subprocess.run([sys.executable, script, f"--folder={folder}", f"--output={output}", *more], check=True)
    found = json.loads(output.read_text())[COMPILED:]
    return {stage: statistics.median(step[stage] for step in found) for stage in STAGES}


if __name__ == "__main__":
    main()
