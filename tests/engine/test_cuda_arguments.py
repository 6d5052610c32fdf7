"""What vLLM's engine is told on CUDA; the scheduler itself needs a GPU."""

from types import SimpleNamespace

import pytest
import vllm

from mindspeed_rl.config.generate import GenerateConfig
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


def test_vllm_wakes_up_to_what_torch_has_given_back_and_says_what_is_asleep() -> None:
    """It asks the device itself, all of which torch's cache may hold after an update; seen on an H200."""
    done: list[str] = []
    # MiB before and after each of the five; the fourth does not ask after it has woken up
    free = iter([10, 80, 80, 60, 60, 11, 11, 85, 65])
    rollout = VllmEngine.__new__(VllmEngine)
    rollout.can_sleep, rollout.asleep_bytes, rollout._woken_bytes = True, 0, 0
    rollout.device = SimpleNamespace(  # type: ignore[assignment]
        empty_cache=lambda: done.append("given back"), free_memory=lambda: next(free)
    )
    rollout.llm = SimpleNamespace(
        wake_up=lambda tags: done.append(f"awake: {tags}"), sleep=lambda level: done.append("asleep")
    )
    asleep = []
    for act in (rollout.sleep, lambda: rollout.wake_up("weights"), lambda: rollout.wake_up("kv_cache")) * 2:
        if len(asleep) < 5:
            act()
            asleep.append(rollout.asleep_bytes)
    assert asleep == [70, 50, 0, 69, 49]
    assert done[:4] == ["given back", "asleep", "given back", "awake: ['weights']"]
