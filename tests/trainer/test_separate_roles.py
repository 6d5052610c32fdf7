"""Rollout on devices of its own, as a user runs it."""

from pathlib import Path

from tests.support.runs import run, training

SEPARATE = (
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
)
ONE_DEVICE = "rl_config.actor_resource.num_npus=1"


def test_rollout_apart_trains_the_same_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    together = run(inputs, tmp_path, ONE_DEVICE, name="together")
    apart = run(inputs, tmp_path, ONE_DEVICE, *SEPARATE, name="apart")
    assert [training(step) for step in apart] == [training(step) for step in together]
    assert apart[0]["timing/export_weights"] > 0
