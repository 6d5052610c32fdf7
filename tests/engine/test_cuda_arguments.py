"""What vLLM's engine is told on CUDA; the scheduler itself needs a GPU."""

from types import SimpleNamespace

import pytest
import vllm

from mindspeed_rl.config.schema import GenerateConfig
from mindspeed_rl.engine.vllm.cuda import SCHEDULER_VERSION, arguments
from mindspeed_rl.engine.vllm.decode_scheduler import DecodeScheduler
from mindspeed_rl.engine.vllm.engine import VllmEngine

GRAPHS = "compilation_config"


@pytest.mark.parametrize("sequences", [1, 3, 100, 256, 300, 512, 1000, 1024])
def test_every_decode_batch_has_a_graph(sequences: int) -> None:
    found = arguments(GenerateConfig(enforce_eager=False, max_num_seqs=sequences), interruptible=False)
    sizes = found[GRAPHS]["cudagraph_capture_sizes"]
    assert sequences in sizes
    assert sizes == sorted(set(sizes))
    assert max(sizes) <= max(sequences, 512)
    for batch in range(1, sequences + 1):
        assert min(size for size in sizes if size >= batch) - batch < 16  # tokens of padding
    assert GRAPHS not in arguments(GenerateConfig(enforce_eager=True, max_num_seqs=sequences), interruptible=False)


@pytest.mark.parametrize(
    ("version", "interruptible", "detokenize", "is_ours"),
    [
        ("0.25.0", False, False, True),
        ("0.25.0", True, False, True),
        ("0.25.0", False, True, True),
        ("0.25.0", True, True, False),  # an interrupted response has no text
        ("0.32.0", False, False, False),
        ("0.2.5", False, False, False),
    ],
)
def test_our_scheduler_is_for_the_version_that_it_was_written_for(
    version: str, interruptible: bool, detokenize: bool, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    cfg = GenerateConfig(sampling_config={"detokenize": detokenize})
    found = arguments(cfg, interruptible)
    assert (found.get("scheduler_cls") is DecodeScheduler) == is_ours == (found.get("async_scheduling") is True)
    assert SCHEDULER_VERSION == "0.25."


def test_vllm_wakes_up_to_what_torch_has_given_back() -> None:
    """It asks the device itself, all of which torch's cache may hold after an update; seen on an H200."""
    done: list[str] = []
    rollout = VllmEngine.__new__(VllmEngine)
    rollout.can_sleep = True
    rollout.device = SimpleNamespace(empty_cache=lambda: done.append("given back"))  # type: ignore[assignment]
    rollout.llm = SimpleNamespace(wake_up=lambda tags: done.append(f"awake: {tags}"))
    rollout.wake_up("weights")
    assert done == ["given back", "awake: ['weights']"]
