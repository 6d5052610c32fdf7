"""What all end-to-end runs start from."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import make_inputs, run

EVERY = ("megatron_training.train_iters=4", "megatron_training.save_interval=1", "actor_config.save_hf=true")


@pytest.fixture(scope="package")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and 16 prompts."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="package")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Checkpoints and metrics of the run that others are compared with: four steps on two data-parallel ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "checkpoints", run(inputs, folder, *EVERY)


@pytest.fixture(scope="package")
def streaming(whole: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Metrics of that run, whose stages overlap."""
    return whole[1]
