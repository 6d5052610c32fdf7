"""`validate_weight` with real engines: a bit that flips on the way and a weight that stays old are found, by name."""

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import run_ranks

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.common.errors import WeightMismatch
from mindspeed_rl.config.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.workers.validation import update_and_validate

EMBEDDING = "model.embed_tokens.weight"


def without(weights: Any, victim: str) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in weights if name != victim)


def flipped(weights: Any, victim: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name == victim:
            tensor = tensor.clone()
            tensor.flatten().view(torch.uint8)[5] ^= 8
        yield name, tensor


def flip_in_all_gather() -> Any:
    """From now on the first all-gather sends another bit than the shard has; returns what undoes it."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original, calls = getattr(dist, name), []

    def all_gather(output: torch.Tensor, mine: torch.Tensor, **kwargs: Any) -> Any:
        if not calls and dist.get_rank() == 1:
            mine[3] ^= 1
        calls.append(1)
        return original(output, mine, **kwargs)

    setattr(dist, name, all_gather)
    return lambda: setattr(dist, name, original)


def scenario(rank: int, folder: str, train: dict[str, int], infer_tp: int, stale: list[tuple[str, str]]) -> None:
    from mindspeed_rl.checkpoint.hf import HFWeights
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state
    from mindspeed_rl.engine.vllm.engine import VllmEngine

    sampling = SamplingConfig(max_tokens=4)
    cfg = GenerateConfig(
        infer_tensor_parallel_size=infer_tp, dtype="float32", max_model_len=64, sampling_config=sampling
    )
    engine = VllmEngine(cfg, folder, device, seed=1, stop_tokens=[0])
    actor = MegatronConfig(**train)
    initialize_parallel_state(actor)
    with open(f"{folder}/config.json") as file:
        model = ModelConfig.from_hf(json.load(file))
    training = MegatronEngine(actor, model, device, 10, HFWeights(folder), with_reference=False)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        return training.export_weights(1 << 14)

    def check(weights: Any = export) -> str:
        """What is wrong, or nothing."""
        try:
            update_and_validate(engine, weights, training.weight_checksums(), 7, rank)
        except WeightMismatch as error:
            return str(error)
        return ""

    update = engine.update_weights
    for victim, named in stale:  # arrives, and is not taken: vLLM keeps what it had
        update((name, tensor + 1) for name, tensor in export())
        engine.update_weights = lambda weights, victim=victim: update(without(weights, victim))  # type: ignore
        message = check()
        assert f"validate_weight, rank {rank}, weights of iteration 7" in message
        assert "did not arrive" not in message
        assert named in message.split("weights in vLLM differ from those of a fresh load of the same tensors: ")[1]
    engine.update_weights = update  # type: ignore[method-assign]
    assert not (message := check()), message
    assert not (message := check()), message

    victim = "model.layers.1.self_attn.o_proj.weight"
    message = check(lambda: flipped(export(), victim))
    assert f"1 tensors did not arrive as the training ranks hold them: {victim}" in message
    assert "fresh load" not in message  # it computes with what it was given
    if train:
        undo = flip_in_all_gather()
        message = check()
        undo()
        assert f"1 tensors did not arrive as the training ranks hold them: {EMBEDDING}" in message
        if rank == 0:  # in vLLM, which pads to 64 tokens, it has all of them
            assert EMBEDDING in message.split("fresh load")[1]
    assert not (message := check()), message


def test_one_rank_with_experts(tmp_path: Any) -> None:
    stale = [
        ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj (packed)"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("model.layers.0.mlp.experts.2.down_proj.weight", "experts"),
    ]
    run_ranks(1, scenario, str(make_tiny_model(tmp_path / "model", "qwen3_moe")), {}, 1, stale)


def test_two_tensor_parallel_ranks(tmp_path: Any) -> None:
    stale = [
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj (packed)"),
        ("model.norm.weight", "model.norm.weight"),
    ]
    folder = str(make_tiny_model(tmp_path / "model", tie=True))
    run_ranks(2, scenario, folder, {"tensor_model_parallel_size": 2}, 2, stale)
