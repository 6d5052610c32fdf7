"""The same step here, with TRL and with verl, one after the other on one GPU: `python benchmarks/peers/compare.py`.

`[--systems ours trl verl] [--steps 4] [--folder FOLDER] [--path trl=FOLDER verl=FOLDER]`

See `trl_grpo.py` and `verl_grpo.py` for what is alike and what is not. What the peers need besides vLLM may lie in
folders of their own (`--path`). With `--folder`, what was found earlier in the same folder is in the table, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from records import Record, publish, train
from step import CONFIG, PROMPT, RESPONSE, SAMPLES, SWITCH, VERIFIER, make_model, make_prompts, overrides

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model

COMPILED = 2  # steps that do not count: kernels are compiled in them
PEERS = ("trl", "verl")
STAGES: dict[str, tuple[str, ...]] = {
    "step": ("timing/all",),
    "rollout": ("timing/rollout",),
    "scoring": ("timing/reference_model",),
    "update": ("timing/update",),
    "switch": SWITCH,
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


def run_ours(folder: Path, settings: list[str]) -> list[dict[str, float]]:
    """Seconds of the stages of every step."""
    steps = train(CONFIG, folder / "ours", *settings)
    return [
        {f"{stage}_s": sum(step.get(key, 0.0) for key in keys) for stage, keys in STAGES.items()} for step in steps
    ]


def run_peer(peer: str, folder: Path, numbers: Mapping[str, float], path: str) -> list[dict[str, float]]:
    """As `run_ours`."""
    output = folder / f"{peer}_steps.json"
    script = Path(__file__).with_name(f"{peer}_grpo.py")
    more = [f"--{key}={value}" for key, value in numbers.items()]
    paths = os.pathsep.join(each for each in (path, os.environ.get("PYTHONPATH", "")) if each)
    environment = os.environ | ({"PYTHONPATH": paths} if paths else {})
    command = [sys.executable, script, f"--folder={folder}", f"--output={output}", *more]
    subprocess.run(command, check=True, env=environment)
    steps: list[dict[str, float]] = json.loads(output.read_text())
    return steps


def table(found: Mapping[str, dict[str, float]], prompts: int, model: str) -> list[Record]:
    """Ours beside each peer; `found`: medians by system."""
    sequences = prompts * SAMPLES
    tokens = dict.fromkeys(STAGES, sequences * (PROMPT + RESPONSE)) | {"rollout": sequences * RESPONSE}
    ours, records = found["ours"], []
    what = f"{model}, {prompts} x {SAMPLES} x {PROMPT}+{RESPONSE} tokens; median of the steps after {COMPILED}"
    for peer in (peer for peer in PEERS if peer in found):
        theirs, note = found[peer], f"{what}; peer: {peer}"
        ratio = theirs["step_s"] / ours["step_s"]
        records.append(Record(f"peers.{peer}.step_ratio", ratio, "times", note=note))
        for stage in STAGES:
            name, own, other = f"peers.{peer}.{stage}", ours[f"{stage}_s"], theirs[f"{stage}_s"]
            records.append(Record(f"{name}_s", own, "s", peer=other, note=note))
            if stage != "switch":
                rate, peers_rate = tokens[stage] / own, tokens[stage] / other
                records.append(Record(f"{name}_tokens_per_s", rate, "tokens/s", peer=peers_rate, note=note))
        taken = f"{note}; taken of the device, caches too"
        records.append(Record(f"peers.{peer}.peak_gb", ours["peak_gb"], "GB", peer=theirs["peak_gb"], note=taken))
    return records


def main() -> None:
    """Run and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=["ours", *PEERS], choices=["ours", *PEERS])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="for inputs and what was found; it stays")
    parser.add_argument("--path", nargs="*", default=[], metavar="SYSTEM=FOLDER", help="for its imports, first")
    args = parser.parse_args()
    paths = dict(each.split("=", 1) for each in args.path)
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = overrides(args.prompts, args.steps, folder)
        cfg, _ = load_config(CONFIG, settings)
        if not (folder / "model").exists():
            folder.mkdir(exist_ok=True)
            (folder / "verifier.py").write_text(VERIFIER)
            make_prompts(args.prompts, folder / "data.jsonl")
            make_model(resolve_model(cfg), folder / "model")
        share = cfg.generate_config.gpu_memory_utilization
        numbers = {"samples": SAMPLES, "response": RESPONSE, "steps": args.steps, "memory": share}
        for system in args.systems:
            with DeviceMemory() as memory:
                if system == "ours":
                    steps = run_ours(folder, settings)
                else:
                    steps = run_peer(system, folder, numbers, paths.get(system, ""))
            median = {stage: statistics.median(step[stage] for step in steps[COMPILED:]) for stage in steps[0]}
            (folder / f"{system}.json").write_text(json.dumps(median | {"peak_gb": memory.peak / 1e9}))
        found = {
            system: json.loads((folder / f"{system}.json").read_text())
            for system in ("ours", *PEERS)
            if (folder / f"{system}.json").exists()
        }
    print(json.dumps(found))
    if "ours" in found:
        publish("peers-cuda", table(found, args.prompts, str(cfg.actor.model)), torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
