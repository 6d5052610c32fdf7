"""A whole step of the trainer on one GPU: tokens a second, and seconds of every stage.

`python benchmarks/step.py [--prompts 128] [--steps 5] [OVERRIDE …]`

Random weights of Qwen2.5-1.5B's shape, 8 responses a prompt, prompts of 128 and responses of 512 tokens whatever they
say (`ignore_eos`), KL to a reference, one update a step. Overrides are those of the command line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

import torch
from memory import RandomWeights
from records import Record, cpu_name, publish, train
from resharding import hf_config
from safetensors.torch import save_file

from examples.make_tiny_model import make_tokenizer
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.model import ModelConfig

CONFIG = "grpo_trainer_qwen25_1b5_h200"
PROMPT, RESPONSE, SAMPLES = 128, 512, 8
SWITCH = ("timing/resharding_to_infer", "timing/resharding_to_train", "timing/offload")
VERIFIER = "def parity(prompt, response, label, **extra):\n    return float(len(response) % 2)\n"


def make_model(model: ModelConfig, folder: Path) -> None:
    """A Hugging Face folder with random weights in bfloat16, and a tokenizer whose tokens are single characters."""
    folder.mkdir()
    weights = RandomWeights(model)
    save_file({name: weights.slice(name).tensor.bfloat16() for name in weights.names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(model) | {"torch_dtype": "bfloat16"}))
    make_tokenizer().save_pretrained(folder)


def make_prompts(count: int, path: Path) -> None:
    """Random digits, which are tokens."""
    digits = random.Random(0)
    rows = [{"prompt": "".join(digits.choices("0123456789", k=PROMPT)), "answer": "0"} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def overrides(prompts: int, steps: int, folder: Path) -> list[str]:
    """Of the configuration, with inputs in `folder`."""
    length, model = PROMPT + RESPONSE, folder / "model"
    return [
        f"megatron_training.global_batch_size={prompts}",
        f"megatron_training.train_iters={steps}",
        f"megatron_training.seq_length={length}",
        f"megatron_training.data_path={folder}/data.jsonl",
        f"megatron_training.tokenizer_name_or_path={model}",
        "megatron_training.apply_chat_template=false",
        *(f"megatron_training.recompute_{key}=null" for key in ("granularity", "method", "num_layers")),
        f"actor_config.load={model}",
        "actor_config.save=null",
        "actor_config.micro_batch_size=32",
        f"rl_config.mini_batch_size={prompts}",
        f"rl_config.n_samples_per_prompt={SAMPLES}",
        f"rl_config.max_prompt_length={PROMPT}",
        "rl_config.ref_forward_micro_batch_size=32",
        "rl_config.verifier_function=[custom]",
        f"rl_config.custom_reward_function.path={folder}/verifier.py",
        "rl_config.custom_reward_function.name=parity",
        f"generate_config.max_model_len={length}",
        f"generate_config.max_num_seqs={prompts * SAMPLES}",
        "generate_config.max_num_batched_tokens=16384",
        f"generate_config.sampling_config.max_tokens={RESPONSE}",
        "generate_config.sampling_config.ignore_eos=true",
    ]


def main() -> None:
    """Run and publish; the first two steps, in which kernels are compiled, do not count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [*overrides(args.prompts, args.steps, folder), *more]
        (folder / "verifier.py").write_text(VERIFIER)
        make_prompts(args.prompts, folder / "data.jsonl")
        cfg, _ = load_config(CONFIG, settings)
        model = resolve_model(cfg)
        make_model(model, folder / "model")
        found = train(CONFIG, folder / "out", *settings)[2:]
    tokens = args.prompts * SAMPLES * (PROMPT + RESPONSE)
    what = f"{cfg.actor.model}, {args.prompts} x {SAMPLES} x {PROMPT}+{RESPONSE} tokens"
    note = f"{what}; median of {len(found)} steps"
    stages = {name for step in found for name in step if name.startswith("timing/") and name != "timing/all"}
    seconds = {name: statistics.median(step[name] for step in found if name in step) for name in stages}
    whole = statistics.median(step["timing/all"] for step in found)
    peak = max(step["memory/device_peak"] for step in found)
    worst = max(step["rollout/logprob_diff_max"] for step in found)
    records = [
        Record("cuda.step_s", whole, "s", note=note),
        Record("cuda.step_tokens_per_s", tokens / whole, "tokens/s", note=note),
        Record(
            "cuda.step_peak_gb", peak * 2**30 / 1e9, "GB", note=f"{what}; the most in use, of training or rollout"
        ),
        Record("cuda.switch_share", sum(seconds.get(name, 0.0) for name in SWITCH) / whole, "", note=note),
        *(
            Record(f"cuda.step_{name.removeprefix('timing/')}_s", seconds[name], "s", note=note)
            for name in sorted(stages)
        ),
        Record(
            "cuda.step_max_logprob_diff", worst, "nat", limit=0.0, note=f"{what}; rollout and training, any token"
        ),
    ]
    on_gpu = torch.cuda.is_available()
    publish("step-cuda", records, torch.cuda.get_device_name() if on_gpu else cpu_name(), write=on_gpu)


if __name__ == "__main__":
    main()
