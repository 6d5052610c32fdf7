"""The step of `benchmarks/step.py` with verl's GRPO trainer (FSDP and vLLM on one GPU): run like `trl_grpo.py`.

Needs, beside vLLM and Ray: verl 0.9, tensordict 0.10, torchdata, datasets, multiprocess, TransferQueue, codetiming,
orjson, pyvers; liger_kernel only for its two options (verl imports it where it is found). No trl may be on the path:
verl 0.9.1 imports of any that it finds what newer ones lack. What is done alike: model, prompts, 8 responses of full
length for each, KL to a reference of weight 0.001, one update of all samples a step, computation in bfloat16, vLLM
with sleep mode and as much of the memory, no recomputation. What is verl's own: float32 master weights, Ray actors,
the reference on the host between its passes, log-probabilities of the policy before the update in a pass of their
own, and tokens that the tokenizer lacks are never sampled. Only its public configuration is used. As no flash
attention is there: attention by torch (`sdpa`), padded batches, in which nothing is padding as all sequences are of
one length, and the fused output layer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
from transformers import AutoTokenizer
from work import work_parser

SCORING = ("old_log_prob", "ref", "adv", "reward")
GRAPHS = [1, 2, 4, 8, 16, 32, 64, *range(128, 1025, 128)]  # sizes of the batches that are decoded with CUDA graphs
LOGICAL_CORES = 20  # its actors reserve 12; for each of these Ray starts a process ahead, which none of them uses
REWARD = """def parity(data_source, solution_str, ground_truth, extra_info=None, **extra):
    return float(len(solution_str) % 2)
"""


def write_inputs(folder: Path, own: Path) -> tuple[int, int]:
    """Prompts and reward as verl reads them; how many prompts there are, and characters (tokens) of the longest."""
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    table = [
        {
            "data_source": "parity",
            "prompt": [{"role": "user", "content": row["prompt"]}],  # the tokenizer's template adds nothing
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(rows)
    ]
    own.mkdir(exist_ok=True)
    pandas.DataFrame(table).to_parquet(own / "train.parquet")
    pandas.DataFrame(table[:1]).to_parquet(own / "test.parquet")  # must be there; never run
    (own / "reward.py").write_text(REWARD)
    return len(rows), max(len(row["prompt"]) for row in rows)


def link_model(model: Path, own: Path) -> None:
    """The same model with a newline among its tokens: verl demands one of Qwen2, though only longer chats use it."""
    own.mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens("\n")
    tokenizer.save_pretrained(own)
    for file in model.iterdir():
        if not (own / file.name).exists():
            (own / file.name).symlink_to(file)


def overrides(args: argparse.Namespace, own: Path, prompts: int, length: int) -> dict[str, object]:
    """Of verl's configuration."""
    policy, actor, rollout, reference = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))
    sequences = prompts * args.samples
    graphs = sorted({size for size in GRAPHS if size < sequences} | {sequences})
    given: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": args.old == "rollout",
        "data.train_files": own / "train.parquet",
        "data.val_files": own / "test.parquet",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": length,
        "data.max_response_length": args.response,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "reward.custom_reward_function.path": own / "reward.py",
        "reward.custom_reward_function.name": "parity",
        f"{policy}.path": own / "model",
        f"+{policy}.override_config.attn_implementation": "sdpa",
        f"{policy}.enable_gradient_checkpointing": False,
        f"{policy}.use_remove_padding": False,
        f"{policy}.use_fused_kernels": True,
        f"{policy}.fused_kernel_options.impl_backend": args.fused,
        f"{policy}.use_liger": args.liger,
        f"{actor}.strategy": args.strategy,
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.ppo_mini_batch_size": prompts,  # of prompts, that is all samples
        f"{actor}.ppo_micro_batch_size_per_gpu": args.micro_batch,
        f"{actor}.use_kl_loss": True,
        f"{actor}.kl_loss_coef": 0.001,
        f"{actor}.kl_loss_type": "low_var_kl",
        f"{actor}.entropy_coeff": 0,
        f"{reference}.log_prob_micro_batch_size_per_gpu": args.forward_batch,
        f"{reference}.fsdp_config.model_dtype": "bf16",  # as it computes; comes from the host for every micro-batch
        f"{rollout}.name": "vllm",
        f"{rollout}.n": args.samples,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": args.memory,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.max_model_len": length + args.response,
        f"{rollout}.max_num_seqs": sequences,
        f"{rollout}.max_num_batched_tokens": 16384,
        f"{rollout}.cudagraph_capture_sizes": json.dumps(graphs, separators=(",", ":")),
        f"{rollout}.calculate_log_probs": args.old == "rollout",
        f"{rollout}.log_prob_micro_batch_size_per_gpu": args.forward_batch,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.logger": "[console,file]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.total_epochs": args.steps,
        "trainer.total_training_steps": args.steps,
        "trainer.default_local_dir": own / "checkpoints",
        "ray_kwargs.ray_init.num_cpus": LOGICAL_CORES,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": own / "hydra",
    }
    return given


def read_steps(path: Path) -> list[dict[str, float]]:
    """Seconds of every step's parts from what verl has logged."""
    steps = []
    for row in (json.loads(line)["data"] for line in path.read_text().splitlines()):
        timing = {key.removeprefix("timing_s/"): value for key, value in row.items() if key.startswith("timing_s/")}
        if "step" not in timing:
            continue
        steps.append(
            {
                "rollout_s": timing["gen"],  # rewards, which come while generating, and vLLM's going to sleep, too
                "scoring_s": sum(timing.get(part, 0.0) for part in SCORING),
                "update_s": timing["update_actor"],
                "switch_s": timing["update_weights"],
                "step_s": timing["step"],
            }
        )
    return steps


def main() -> None:
    """Run; writes what it has found."""
    parser = work_parser(__doc__)
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences of a training micro-batch")
    parser.add_argument("--forward-batch", type=int, default=64, help="sequences of a micro-batch without gradients")
    parser.add_argument("--fused", choices=["torch", "triton", "liger"], default="torch", help="output layer")
    parser.add_argument("--liger", action="store_true", help="Liger's kernels in the layers")
    parser.add_argument("--strategy", choices=["fsdp", "fsdp2"], default="fsdp")
    parser.add_argument(
        "--old",
        choices=["recompute", "rollout"],
        default="recompute",
        help="where the old log-probabilities come from",
    )
    parser.add_argument("--show", action="store_true", help="print the overrides and stop")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    if importlib.util.find_spec("trl") is not None:
        raise SystemExit("verl fails where trl is on the path")
    own = args.folder / "verl"
    prompts, length = write_inputs(args.folder, own)
    link_model(args.folder / "model", own / "model")
    given = [f"{key}={value}" for key, value in overrides(args, own, prompts, length).items()]
    if args.show:
        print("\n".join(given))
        return
    log = own / "steps.jsonl"
    environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(log), "HF_HUB_OFFLINE": "1", "HYDRA_FULL_ERROR": "1"}
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *given], check=True, env=environment)
    args.output.write_text(json.dumps(read_steps(log)))


if __name__ == "__main__":
    main()
