"""Adapters (LoRA) in the whole trainer: merged on the way to rollout, alone in checkpoints, and going on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.convert_checkpoint import mcore_to_hf
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import open_checkpoint
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.schema import Config
from mindspeed_rl.trainer.inputs import choose_source
from tests.support.runs import run, training

LORA = (
    "megatron_training.train_iters=3",
    "megatron_training.save_interval=1",
    "actor_config.save_hf=true",
    "actor_config.lora_r=4",
    "actor_config.lora_alpha=8",
    "actor_config.lora_target_modules=[linear_qkv,linear_fc2]",
    "actor_config.tensor_model_parallel_size=2",
    "actor_config.sequence_parallel=true",
    "generate_config.validate_weight=true",
    *(
        f"generate_config.offload_{part}=true"
        for part in ("train_param", "train_grad", "train_optimizer", "reference")
    ),
)
ADAPTED = {"q_proj", "k_proj", "v_proj", "down_proj"}


def test_a_run_trains_adapters_alone_and_goes_on(inputs: Path, tmp_path: Path) -> None:
    steps = run(inputs, tmp_path, *LORA)
    # rollout has W + s B A, training W x + s B A x: the same policy
    assert all(step["rollout/logprob_diff_max"] < 2e-5 for step in steps)
    assert steps[0]["actor/kl"] < steps[2]["actor/kl"]  # to the actor without adapters
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    root = tmp_path / "checkpoints"
    checkpoint = open_checkpoint(root)
    assert all(name.startswith("lora.") for name in checkpoint.tensors.names())
    start, merged = HFWeights(inputs / "model"), HFWeights(checkpoint.path / "hf")
    assert sorted(start.names) == sorted(merged.names) == sorted(checkpoint.weight_names)
    for name in start.names:
        is_same = torch.equal(start.tensor(name), merged.tensor(name))
        assert is_same != (name.split(".")[-2] in ADAPTED and name.endswith("weight")), name
    config = json.loads((checkpoint.path / "adapter" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == ADAPTED
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["base_model_name_or_path"] == str(inputs / "model")
    assert len(load_file(checkpoint.path / "adapter" / "adapter_model.safetensors")) == 2 * 4 * 2

    mcore_to_hf(root, tmp_path / "converted")
    converted = HFWeights(tmp_path / "converted")
    assert all(torch.equal(converted.tensor(name), merged.tensor(name)) for name in merged.names)

    second = f"actor_config.load={root}/iter_0000002"
    again = run(inputs, tmp_path, *LORA, second, name="again")
    assert [training(step) for step in again] == [training(steps[2])]

    def config_with(**actor: object) -> Config:
        return Config(megatron_training={}, actor_config={"load": str(root), **actor})

    with pytest.raises(CheckpointError, match=r"is of a run with lora_r = 4, .* this one has lora_r = 0"):
        choose_source(config_with())
    with pytest.raises(CheckpointError, match=r"this one has lora_r = 4, lora_alpha = 32"):
        choose_source(config_with(lora_r=4, lora_target_modules=["linear_qkv", "linear_fc2"]))
    with pytest.raises(CheckpointError, match=r"holds adapters, no weights to start from: .* --direction mcore2hf"):
        choose_source(config_with(finetune=True))
