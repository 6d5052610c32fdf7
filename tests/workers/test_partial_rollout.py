"""The rollout role over a real dock, with an engine that counts tokens: whole responses, each token once."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_rl.types import PartialResponse

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from partial_rollout import simulate

BATCH, ITERATIONS = 4, 12


def partial(split, *overrides):
    return (f"rl_config.partial_rollout_max_split={split}", *overrides)


@pytest.fixture(scope="module")
def lengths():
    return np.clip(np.random.default_rng(1).lognormal(3, 1, (200, 3)).astype(int), 1, 400)


@pytest.mark.parametrize("keep_order", ["true", "false"])
@pytest.mark.parametrize("split", [2, 3, 5])
def test_every_response_is_whole_and_every_token_generated_once(lengths, split, keep_order):
    """`simulate` checks both as it goes: the engine refuses to generate a token again."""
    engine, trained = simulate(
        lengths,
        ITERATIONS,
        BATCH,
        *partial(split, "rl_config.partial_rollout_threshold=0.6", f"rl_config.guarantee_order={keep_order}"),
    )
    seen = [prompt for iteration in trained for prompt in iteration]
    assert len(seen) == len(set(seen)) == BATCH * ITERATIONS
    prompts_in_generation = 7  # 4 / 0.6, rounded up: the first iteration draws so many, each later one 4
    for number, iteration in enumerate(trained):
        drawn = [0 if prompt < prompts_in_generation else (prompt - 3) // BATCH for prompt in iteration]
        assert all(number - split < first <= number for first in drawn), f"iteration {number} trains on {drawn}"
    whole, _ = simulate(lengths, ITERATIONS, BATCH)
    assert engine.steps < whole.steps, "the long tail costs less"


@pytest.mark.parametrize("keep_order", ["true", "false"])
def test_rollout_replicas_stop_together(lengths, keep_order):
    """Each generates its share; what one completes may be what the other was waiting to be stopped for."""
    _, trained = simulate(
        lengths,
        ITERATIONS,
        BATCH,
        *partial(3, "rl_config.partial_rollout_threshold=0.6", f"rl_config.guarantee_order={keep_order}"),
        replicas=2,
    )
    seen = [prompt for iteration in trained for prompt in iteration]
    assert len(seen) == len(set(seen)) == BATCH * ITERATIONS


def test_with_the_guarantee_of_order_a_selection_ascends_and_the_oldest_come_first(lengths):
    _, trained = simulate(lengths, ITERATIONS, BATCH, *partial(3, "rl_config.partial_rollout_threshold=0.6"))
    carried = set(range(7)) - set(trained[0])
    for iteration in trained:
        assert iteration == sorted(iteration)
    assert carried <= set(trained[1]) | set(trained[2])


def test_groups_in_their_last_iteration_end_where_they_are():
    """One response far longer than all others: without waiting for it, no iteration takes as long as it would."""
    lengths = np.full((60, 2), 8)
    lengths[0, 1] = 2000
    waiting, _ = simulate(lengths, 4, BATCH, *partial(2, "rl_config.partial_rollout_threshold=0.6"))
    cut, trained = simulate(
        lengths,
        4,
        BATCH,
        *partial(2, "rl_config.partial_rollout_threshold=0.6", "rl_config.require_max_age_all_finished=false"),
    )
    assert waiting.steps > 2000 > 200 > cut.steps
    assert 0 in trained[1], "the group is trained on in its second iteration, its long response cut"
    assert cut.generated[1] < 200


def test_a_partial_response_joins_what_policies_added():
    response = PartialResponse.empty().extended([5, 6], [-0.5, -0.25], version=3).extended([7], [-1.0], version=4)
    assert response.tokens.tolist() == [5, 6, 7]
    assert response.log_probs.tolist() == [-0.5, -0.25, -1.0]
    assert response.versions.tolist() == [3, 3, 4]
    assert torch.isnan(PartialResponse.empty().extended([1], None, 0).log_probs).all()
