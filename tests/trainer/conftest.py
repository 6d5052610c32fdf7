"""What all end-to-end runs start from."""

from pathlib import Path

import pytest

from tests.support.runs import make_inputs


@pytest.fixture(scope="package")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and 16 prompts."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder
