import pytest


@pytest.fixture(autouse=True)
def no_models_here(tmp_path, monkeypatch):
    """Shipped configurations name paths relative to the working folder, where an example may have made its model."""
    monkeypatch.chdir(tmp_path)
