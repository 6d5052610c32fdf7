"""A run over two Ray nodes: placed on both, ended by the loss of one, and gone on with from its checkpoint."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.support.runs import command, run, started


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, Any]]:
    """Two nodes, with a CPU each, and a handle of the second."""
    both = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield both, both.add_node(num_cpus=1)
    both.shutdown()


def workers_below(process: int) -> list[psutil.Process]:
    """Ranks of a run on nodes that this process has started."""
    below = psutil.Process(process).children(recursive=True)
    return [each for each in below if "IntegratedWorker" in " ".join(each.cmdline())]


def latest(folder: Path) -> int:
    """Number of the newest checkpoint; 0: none."""
    file = folder / "checkpoints" / "latest"
    return int(re.findall(r"\d+", file.read_text())[0]) if file.exists() else 0


def test_a_lost_node_is_named_and_costs_no_more_than_the_last_steps(
    inputs: Path, tmp_path: Path, cluster: tuple[Cluster, Any]
) -> None:
    both, other = cluster
    address = f"ray_address={both.address}"
    saving = ("megatron_training.save_interval=1", "generate_config.max_num_seqs=8")
    cores = ("rl_config.num_cpus_for_local_task=0", address, *saving)
    endless = command(inputs, tmp_path, "megatron_training.train_iters=1000", "run_name=lost", *cores)
    with started(endless, until=lambda: latest(tmp_path) >= 2) as process:
        workers = workers_below(os.getpid())
        assert len({worker.ppid() for worker in workers}) == len(workers) == 2  # a node each
        for started_process in other.live_processes():
            os.kill(started_process[1].pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=90)
    assert process.returncode == 3, stderr[-3000:]
    assert re.search(r"node [\d.]+ \(\w{8}\) was lost with worker rank 1 in stage '[\w ]+' at step \d+: ", stderr), (
        stderr
    )
    assert f"actor_config.resume=auto goes on from the newest checkpoint in {tmp_path}/checkpoints" in stderr
    assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []

    saved = latest(tmp_path)
    both.add_node(num_cpus=1)
    total = f"megatron_training.train_iters={saved + 1}"
    (step,) = run(inputs, tmp_path, total, "actor_config.resume=auto", *cores, name="on")
    assert step["step"] == saved + 1
