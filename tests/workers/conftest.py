"""Reward workers of tests live in pytest's own process."""

import pytest


@pytest.fixture(autouse=True)
def _output_is_left_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward worker sends its process's output and log to a file, for good: pytest would lose all that follows."""
    monkeypatch.setattr("mindspeed_rl.workers.reward_worker.setup_logging", lambda *_, **__: None)
