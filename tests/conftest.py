"""Shared by all tests: the repository on the path, one thread, and a tiny model made once."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folder of the tiny Qwen2 (16 tokens, random weights, float32)."""
    from examples.make_tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny_qwen2")
