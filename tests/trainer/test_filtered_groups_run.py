"""Dynamic sampling in the whole trainer: waves, surplus that is carried over and survives a restart, filling up."""

from pathlib import Path

import pytest

from mindspeed_rl.checkpoint.state import CheckpointReader
from tests.support.runs import run, training

BATCH, GROUP = 8, 4  # of `command`
FILTER = (
    "rl_config.custom_reward_function.name=partly",  # 4 of 16 prompts get the same reward whatever the response
    "rl_config.filter_groups_enable=true",
    "megatron_training.train_iters=4",
    "megatron_training.save_interval=1",
)


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory):
    """Folder and metrics of a run that was not interrupted, with a checkpoint after every step."""
    folder = tmp_path_factory.mktemp("filtered")
    return folder, run(inputs, folder, *FILTER)


def carried(folder: Path, step: int) -> int:
    """Groups that a step leaves to the next one, by its checkpoint."""
    checkpoint = CheckpointReader(folder / "checkpoints" / f"iter_{step:07d}")
    groups = checkpoint.trainer["carried"]
    if groups:
        saved = checkpoint.attachment("dock.pkl").state["iterations"][step]
        assert saved["begin"].num_prompts == groups + BATCH
    return groups


def test_every_step_trains_on_a_whole_batch_of_groups_that_differ(whole):
    folder, steps = whole
    surplus = 0
    for number, step in enumerate(steps, 1):
        assert step["reward/filled_groups"] == 0
        assert step["reward/zero_variance_groups"] == 0, "of those that are trained on"
        assert step["reward_status/ok"] == step["rollout/waves"] * BATCH * GROUP, "nothing is scored twice"
        assert step["staleness/max"] == (1 if surplus else 0), "surplus is first in line"
        generated = step["rollout/waves"] * BATCH
        surplus += round(generated * (1 - step["reward/filtered_groups"])) - BATCH
        assert 0 <= surplus < BATCH
        assert carried(folder, number) == surplus
    assert any(step["reward/filtered_groups"] > 0 for step in steps)
    assert any(step["rollout/waves"] > 1 for step in steps)
    assert carried(folder, 2) > 0


def test_a_resumed_run_goes_on_with_surplus_groups(inputs: Path, tmp_path: Path, whole):
    folder, steps = whole
    checkpoint = folder / "checkpoints" / "iter_0000002"
    resumed = run(inputs, tmp_path, *FILTER, f"actor_config.load={checkpoint}")
    assert [training(step) for step in resumed] == [training(step) for step in steps[2:]]


def test_a_run_that_finds_too_few_is_filled_up(inputs: Path, tmp_path: Path):
    """With the roles in turn and without an order, too; the metric is that of a verifier."""
    steps = run(
        inputs,
        tmp_path,
        *FILTER,
        "rl_config.filter_groups_metric=custom",
        "rl_config.filter_groups_max_batches=1",
        "rl_config.blocking=true",
        "rl_config.guarantee_order=false",
        "megatron_training.train_iters=2",
    )
    for step in steps:
        assert step["rollout/waves"] == 1
        assert step["reward/filled_groups"] == round(BATCH * step["reward/filtered_groups"])
        assert step["reward/zero_variance_groups"] == step["reward/filtered_groups"]
        assert step["staleness/max"] == 0
    assert sum(step["reward/filled_groups"] for step in steps) >= 4, "16 prompts, 4 of which never differ"
