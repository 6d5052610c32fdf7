import pytest
from reward_model_examples import write_shape


@pytest.fixture(autouse=True)
def no_models_here(tmp_path, monkeypatch):
    """Shipped configurations name paths relative to the working folder, where an example may have made its model."""
    monkeypatch.chdir(tmp_path)
    write_shape(tmp_path / "reward")
    write_shape(tmp_path / "two_labels", id2label=None)
