"""The same two iterations under several parallel layouts: how far losses and log-probs are from one rank's.

Needs the model and data that `bash examples/quickstart.sh` makes. `python benchmarks/layouts.py`
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from records import Record, cpu_name, publish, train

STEPS = 2
SETTINGS = (
    f"megatron_training.train_iters={STEPS}",
    "rl_config.init_kl_coef=0.05",
    "rl_config.mini_batch_size=16",
    "actor_config.micro_batch_size=32",
    "rl_config.use_tensorboard=false",
)
LAYOUTS = {
    "one rank": ("rl_config.actor_resource.num_npus=1",),
    "DP 2": (),
    "TP 2 → rollout TP 1": ("actor_config.tensor_model_parallel_size=2",),
    "TP 2, sequence parallel → rollout TP 2": (
        "actor_config.tensor_model_parallel_size=2",
        "actor_config.sequence_parallel=true",
        "generate_config.infer_tensor_parallel_size=2",
    ),
    "DP 2 → rollout TP 2": ("generate_config.infer_tensor_parallel_size=2",),
    "PP 2 → rollout TP 1": ("actor_config.pipeline_model_parallel_size=2",),
}


def main() -> None:
    """Run and publish."""
    runs = {}
    for name, overrides in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder)
            runs[name] = train(
                "grpo_trainer_tiny_cpu", output, *SETTINGS, f"actor_config.save={output}/save", *overrides
            )
    reference = runs["one rank"]
    records = []
    for name, steps in runs.items():
        assert all(a["reward/mean"] == b["reward/mean"] for a, b in zip(steps, reference, strict=True)), (
            f"{name} sampled other tokens: losses cannot be compared"
        )
        losses = [abs(a["actor/loss"] - b["actor/loss"]) for a, b in zip(steps, reference, strict=True)]
        mismatch = max(step["rollout/logprob_diff_max"] for step in steps)
        records += [
            Record("layouts.loss_diff", max(losses), "", 0.0, note=f"{name}, against one rank, {STEPS} iterations"),
            Record("layouts.logprob_diff", mismatch, "nat", 0.0, note=f"{name}, rollout against training, any token"),
        ]
    for metric in ("loss_diff", "logprob_diff"):
        worst = max(r.value for r in records if r.metric == f"layouts.{metric}")
        records.append(
            Record(f"layouts.max_{metric}", worst, records[0].unit if metric == "loss_diff" else "nat", 0.0)
        )
    publish("layouts-cpu", records, cpu_name())


if __name__ == "__main__":
    main()
