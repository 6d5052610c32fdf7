"""Every algorithm of `benchmarks/learning.py` learns the tiny task: `pytest -m learning`, minutes for each."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from learning import AIM, ALGORITHMS, LAST, learn


@pytest.fixture(scope="module", autouse=True)
def inputs() -> None:
    """The model and the data of the quickstart, by way of one step of it."""
    one_step = ["megatron_training.train_iters=1", "actor_config.save=null"]
    subprocess.run(["bash", str(ROOT / "examples" / "quickstart.sh"), *one_step], check=True)


@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_learns(name: str, tmp_path: Path) -> None:
    rewards = learn(name, tmp_path)
    assert rewards[0] < 0.2
    assert statistics.fmean(rewards[-LAST:]) >= AIM
