"""When checkpoints are complete: real store and writers, with ranks in this process."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.checkpoint.background import BackgroundWriter
from mindspeed_rl.checkpoint.state import CheckpointReader, CheckpointStore, open_checkpoint
from mindspeed_rl.checkpoint.tensors import Piece
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.trainer.saver import Saver

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2


class Ranks:
    """Ranks that share a tensor, which training changes in place; a `Fleet`, as far as saving is concerned."""

    def __init__(self, elements: int, asynchronous: bool = True):
        self.weights = torch.zeros(RANKS, elements)
        self.writers = [BackgroundWriter(CpuDevice()) for _ in range(RANKS)]
        self.asynchronous = asynchronous
        self.watch: Any = SimpleNamespace(wait=lambda calls: [call() for call in calls])

    def save(self, root: str, iteration: int) -> list[Any]:
        def save_rank(rank: int) -> None:
            shape = tuple(self.weights.shape)
            pieces = [Piece("model.w", shape, (rank, 0), self.weights[rank : rank + 1])]
            write = self.writers[rank].write if self.asynchronous else CheckpointStore.write_rank
            write(CheckpointStore(root), iteration, rank, pieces, {})

        return [lambda rank=rank: save_rank(rank) for rank in range(RANKS)]

    def finish_save(self, iteration: int) -> list[Any]:
        return [writer.wait for writer in self.writers]


def saver_at(root: Path, ranks: Ranks, **actor: Any) -> Saver:
    actor = {"save": str(root), "async_save": ranks.asynchronous, **actor}
    config = Config(megatron_training={}, actor_config=actor, rl_config={"stage_timeout_minutes": 0.1})
    store = CheckpointStore(root, layout=SimpleNamespace(world=RANKS, tp=1, pp=1, dp=RANKS, ep=1))
    return Saver(config, store, ranks, needed="")  # type: ignore[arg-type]


def saved(root: Path) -> tuple[int, float]:
    """Iteration of the newest checkpoint, and the one value of all its weights."""
    reader = open_checkpoint(root)
    reader.check_tensors()
    ((_, weights),) = reader.weights()
    assert (weights == weights[0, 0]).all()
    return reader.trainer["iteration"], float(weights[0, 0])


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    ranks = Ranks(2**24)
    saver = saver_at(tmp_path, ranks, keep_last=1)
    for iteration in (1, 2):
        ranks.weights.fill_(iteration)
        saver.save(iteration, {}, None)
        ranks.weights.fill_(-1)
        latest = saver.store.latest()  # its files may be gone before they could be read: the next one replaces it
        assert (latest and latest.name) == (None if iteration == 1 else "iter_0000001"), "not yet complete"
        saver.check()  # nothing has failed
    saver.wait()
    assert saved(tmp_path) == (2, 2)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]
    saver.wait()  # nothing to wait for
    saver.close(None)


def test_without_async_save_it_is_complete_on_return(tmp_path: Path) -> None:
    saver = saver_at(tmp_path, Ranks(10, asynchronous=False))
    saver.save(1, {"some": "state"}, {"dock.pkl": [1, 2]})
    reader = CheckpointReader(tmp_path / "iter_0000001")
    assert reader.trainer["some"] == "state"
    assert reader.attachment("dock.pkl") == [1, 2]
    saver.close(None)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_failure_ends_the_run_at_its_next_step_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ranks = Ranks(2**20)
    saver = saver_at(tmp_path, ranks)
    ranks.weights.fill_(1)
    saver.save(1, {}, None)
    saver.wait()
    ranks.writers[1]._thread.submit(time.sleep, 0.5)  # this rank's disk is slow …
    saver.save(2, {}, None)
    (tmp_path / ".tmp-iter_0000002" / "tensors").rename(tmp_path / "gone")  # … and then it is full

    with pytest.raises(CheckpointError, match=r"checkpoint 2 could not be written: rank_0000\d: FileNotFoundError"):
        until(saver.check)
    saver.close(CheckpointError)
    assert saved(tmp_path) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "is_waited_for"), [(KeyboardInterrupt, True), (SystemExit, True), (CheckpointError, False)]
)
def test_an_orderly_stop_waits_and_an_error_does_not(
    tmp_path: Path, kind: type[BaseException], is_waited_for: bool
) -> None:
    ranks = Ranks(2**20)
    saver = saver_at(tmp_path, ranks)
    for writer in ranks.writers:
        writer._thread.submit(time.sleep, 0.3)
    saver.save(1, {}, None)
    saver.close(kind)
    assert (saver.store.latest() is not None) == is_waited_for
    for writer in ranks.writers:
        writer.wait()


def test_a_rank_that_never_writes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    ranks = Ranks(10)
    saver = saver_at(tmp_path, ranks)
    saver.deadline_minutes = 0.01
    ranks.writers[0]._thread.submit(time.sleep, 1)
    saver.save(1, {}, None)
    with pytest.raises(CheckpointError, match=r"checkpoint 1 is not written after 0\.01 minutes"):
        saver.wait()
    saver.close(CheckpointError)


KILLED = """
import sys, pathlib
sys.path[:0] = sys.argv[2:]
from test_saver import Ranks, saver_at
ranks = Ranks(2**26)
saver = saver_at(pathlib.Path(sys.argv[1]), ranks)
for iteration in (1, 2):
    ranks.weights.fill_(iteration)
    saver.save(iteration, {}, None)
    ranks.weights.fill_(-1)
saver.wait()
"""


def test_a_kill_while_one_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    root = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(root), str(ROOT), str(Path(__file__).parent)])
    second = root / ".tmp-iter_0000002" / "tensors" / "__0_0.distcp"
    until(lambda: second.exists() and second.stat().st_size > 2**20)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert second.exists(), "half of it"
    assert saved(root) == (1, 1)
    ranks = Ranks(2**10)
    ranks.weights.fill_(2)
    saver = saver_at(root, ranks)
    saver.save(2, {}, None)
    saver.wait()
    saver.close(None)
    assert saved(root) == (2, 2)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", "iter_0000002", "latest"]
