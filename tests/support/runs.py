"""Training runs as a user starts them, small enough for tests."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.make_tiny_model import make_tiny_model
from tests.support.forked import ROOT, run_forked

# numbers that must be the same for runs that do the same: what training computed, not how long it took
TRAINING = re.compile(r"(actor|critic|reward|response_length|prompt_length|rollout)/.*")

VERIFIERS = '''
"""Scores that depend on what was sampled; one that sometimes fails; one that never differs."""
import math, os, time

def overlap(prompt, response, label, **extra):
    return sum(c.isdigit() for c in response) / 8 + float(label in response)

def partly(prompt, response, label, **extra):
    return 0.5 if prompt.startswith("0") else overlap(prompt, response, label)

def faulty(prompt, response, label, **extra):
    if prompt == "0+0=":
        return math.nan
    if prompt == "0+1=":
        os._exit(7)
    if prompt == "0+2=":
        time.sleep(3600)
    if prompt == "0+3=":
        raise RuntimeError("no score")
    return 0.5
'''


def make_inputs(folder: Path) -> None:
    """A tiny model, 16 prompts and verifiers."""
    make_tiny_model(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(VERIFIERS)


def command(inputs: Path, output: Path, *overrides: str) -> list[str]:
    script = "train_ppo.py" if "megatron_training.stage=ray_ppo" in overrides else "train_grpo.py"
    return [
        sys.executable,
        str(ROOT / "cli" / script),
        "--config-name=grpo_trainer_tiny_cpu",
        f"output_dir={output}",
        f"megatron_training.data_path={inputs}/data.jsonl",
        f"megatron_training.tokenizer_name_or_path={inputs}/model",
        "megatron_training.train_iters=2",
        "megatron_training.global_batch_size=8",
        "megatron_training.save_interval=1000",
        f"actor_config.load={inputs}/model",
        f"actor_config.save={output}/checkpoints",
        "actor_config.micro_batch_size=4",
        "actor_config.lr=1e-3",
        "rl_config.mini_batch_size=4",
        "rl_config.n_samples_per_prompt=4",
        "rl_config.init_kl_coef=0.05",
        "rl_config.entropy_coeff=0.01",
        "rl_config.actor_forward_micro_batch_size=4",
        "rl_config.ref_forward_micro_batch_size=4",
        "rl_config.verifier_function=[custom]",
        f"rl_config.custom_reward_function.path={inputs}/rewards.py",
        "rl_config.custom_reward_function.name=overlap",
        *overrides,
    ]


def run(inputs: Path, output: Path, *overrides: str, name: str = "run") -> list[dict[str, Any]]:
    """Metrics of every step of a run that must succeed."""
    script, *arguments = command(inputs, output, *overrides, f"run_name={name}")[1:]
    said = output / f"{name}.txt"
    assert run_forked(Path(script).stem, arguments, said) == 0, said.read_text()[-6000:]
    return [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def started(arguments: list[str], until: Callable[[], bool]) -> Iterator[subprocess.Popen[str]]:
    """A command that is to be disturbed, once `until` is true; ended here if the test does not get to that."""
    # what a shell starts in the background ignores Ctrl-C, and so would all that the tests start from there
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 200
        while not until():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()  # nothing if it has ended
        process.wait(timeout=60)


def training(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if TRAINING.fullmatch(name)}


def spans(folder: Path) -> list[dict[str, Any]]:
    """Complete events of a run's trace, with the name of the process, in order of their start."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = [{**event, "process": names[event["pid"]]} for event in events if event["ph"] == "X"]
    return sorted(found, key=lambda event: event["ts"])
