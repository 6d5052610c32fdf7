"""Every family in the training engine against transformers, also beyond the original length."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.families import FAMILIES, LENGTH, ORIGINAL_LENGTH, make_family
from support.ranks import run_ranks
from support.reference import hf_log_probs, of_responses
from transformers import AutoModelForCausalLM

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.types import RolloutBatch

TEMPERATURE = 0.7
TOLERANCE = 1e-5  # nats; float32, another order of summation
PACKED = [[0, 3, 1], [2, 4]]


def make_batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    lengths = [(2, 9), (30, 34), (1, 63), (5, 1), (17, 20)]  # prompt, response

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(1, 16, (length,), generator=generator)

    return RolloutBatch([tokens(prompt) for prompt, _ in lengths], [tokens(response) for _, response in lengths], {})


def score(rank: int, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What one rank makes of all models in turn: log-probs of the batch, and the weights again."""
    from mindspeed_rl.checkpoint.hf import HFWeights
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    cfg, found = MegatronConfig(), {}
    initialize_parallel_state(cfg)
    for name, folder in folders.items():
        weights = HFWeights(folder)
        engine = MegatronEngine(cfg, ModelConfig.from_hf(weights.config()), device, 10, weights, with_reference=True)
        found[name] = {
            "log_probs": engine.score(make_batch(), PACKED, TEMPERATURE).log_probs,
            "reference": engine.score(make_batch(), PACKED, TEMPERATURE, reference=True).log_probs,
            "weights": {key: tensor.clone() for key, tensor in engine.export_weights(1 << 14)},
        }
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_family(root / name, name) for name in FAMILIES}


@pytest.fixture(scope="module")
def scored(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return run_ranks(1, score, folders)[0]


def expected(folder: Path, **changes: Any) -> torch.Tensor:
    batch, model = make_batch(), AutoModelForCausalLM.from_pretrained(folder, **changes)
    with torch.no_grad():
        return of_responses(hf_log_probs(model, batch, TEMPERATURE), batch)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_equal_those_of_transformers(name: str, folders: Any, scored: Any) -> None:
    for key in ("log_probs", "reference"):
        torch.testing.assert_close(scored[name][key], expected(folders[name]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [name for name, (_, changes) in FAMILIES.items() if "rope_parameters" in changes])
def test_scaling_is_no_small_thing_in_these_models(name: str, folders: Any) -> None:
    """Else the comparison above would pass without it."""
    assert max(make_batch().lengths) == LENGTH > ORIGINAL_LENGTH
    plain = {"rope_type": "default", "rope_theta": FAMILIES[name][1]["rope_parameters"]["rope_theta"]}
    difference = expected(folders[name]) - expected(folders[name], rope_parameters=plain)
    assert difference.abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_back_bit_for_bit(name: str, folders: Any, scored: Any) -> None:
    stored, found = load_file(folders[name] / "model.safetensors"), scored[name]["weights"]
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[key], stored[key]) for key in stored)
