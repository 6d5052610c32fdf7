"""A reward model in Megatron-core gives the scores of transformers' sequence classification, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.reward_models import make_reward_model, scores_of
from transformers import AutoModelForSequenceClassification

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.model import CriticModel
from mindspeed_rl.config.schema import MegatronConfig

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP2": (2, {}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
}
LENGTHS = (7, 1, 12, 5)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 16, (length,), generator=generator) for length in LENGTHS]


def score(rank: int, folder: str, settings: dict[str, Any]) -> tuple[int, torch.Tensor, torch.Tensor] | None:
    """This rank's data-parallel rank, and its share of the rewards: at first, and after weights were away."""
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.engine import initialize_parallel_state
    from mindspeed_rl.engine.megatron.reward_model import RewardModelEngine

    cfg, weights = MegatronConfig(**settings), HFWeights(folder)
    initialize_parallel_state(cfg)
    engine = RewardModelEngine(cfg, CriticModel.from_hf(weights.config()), device, weights)
    share = len(LENGTHS) // engine.data_parallel_size
    mine, passes = sequences()[engine.data_parallel_rank * share :][:share], [range(1), range(1, share)]
    first = engine.rewards(mine, passes)
    engine.offload()
    assert sum(p.untyped_storage().nbytes() for chunk in engine.chunks for p in chunk.parameters()) == 0
    engine.onload()
    again = engine.rewards(mine, [[share - 1], list(range(share - 1))])
    return None if first is None or again is None else (engine.data_parallel_rank, first, again)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model")


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_are_those_of_transformers(name: str, folder: Path, tmp_path: Path) -> None:
    world, settings = LAYOUTS[name]
    if name == "EP2":
        folder = make_reward_model(tmp_path / "model", architecture="qwen3_moe")
    found = sorted(filter(None, run_ranks(world, score, str(folder), settings)), key=lambda each: each[0])
    expected = scores_of(folder, sequences())
    assert expected.std() > 0.1
    for number in (1, 2):
        torch.testing.assert_close(torch.cat([each[number] for each in found]), expected, atol=1e-5, rtol=0)


def test_a_folder_without_a_head_is_refused(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.model.save_pretrained(tmp_path / "headless")
    config = (folder / "config.json").read_text()
    (tmp_path / "headless" / "config.json").write_text(config)
    with pytest.raises(AssertionError, match=f"{CheckpointError.__name__}.*score.weight"):
        run_ranks(1, score, str(tmp_path / "headless"), {})
