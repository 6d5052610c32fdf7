"""A mixture of experts as a user trains it: ranks that share experts train what ranks with all of them train."""

from pathlib import Path

import pytest

from examples.make_tiny_model import make_tiny_model
from tests.support.runs import make_inputs, run, training

SAME_IN_FLOAT32 = 2e-5
PRESET = "tiny_qwen3_moe"
EXPERTS = (f"model={PRESET}", f"megatron_training.model={PRESET}", f"actor_config.model={PRESET}")
SHARED = "actor_config.expert_model_parallel_size=2"
TOKEN_CAP = (  # how many passes a rank makes depends on its sequences: those that share experts must agree
    "rl_config.use_dynamic_bsz=true",
    "rl_config.max_packing_token_size=24",
    "~actor_config.micro_batch_size",
    "~rl_config.actor_forward_micro_batch_size",
    "~rl_config.ref_forward_micro_batch_size",
)


def test_shared_experts_train_the_same(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    make_tiny_model(tmp_path / "model", "qwen3_moe")
    reference = run(tmp_path, tmp_path, *EXPERTS, name="reference")
    assert reference[0]["rollout/logprob_diff_max"] < 1e-5
    offload = [f"generate_config.offload_train_{part}=true" for part in ("param", "grad", "optimizer")]
    found = run(tmp_path, tmp_path, *EXPERTS, SHARED, *offload, *TOKEN_CAP, name="shared")
    for step, expected in zip(found, reference, strict=True):
        assert step["rollout/logprob_diff_max"] < 1e-5
        for metric, value in training(expected).items():
            if metric.split("/")[0] in ("actor", "rollout"):
                assert step[metric] == pytest.approx(value, abs=SAME_IN_FLOAT32), metric
            else:
                assert step[metric] == value, metric
