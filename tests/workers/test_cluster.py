"""Placement, logs and the keys of `ray`, on real Ray nodes."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from mindspeed_rl.common.errors import ConfigError, WorkerFailed
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.trainer.launch import _ray
from mindspeed_rl.workers.logs import collect_logs
from mindspeed_rl.workers.placement import Placement

PAIRS = ("rl_config.actor_resource.num_npus=4", "generate_config.infer_tensor_parallel_size=2")


def configured(*overrides: str) -> Config:
    return load_config("grpo_trainer_tiny_cpu", overrides)[0]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    yield started
    started.shutdown()


def test_groups_wait_for_their_node_and_logs_come_from_it(tmp_path: Path, cluster: Cluster) -> None:
    address = f"ray_address={cluster.address}"
    waiting = configured(address, "ray.nodes_timeout_minutes=2", *PAIRS)
    layout = derive_layout(waiting)
    with _ray(waiting, layout):
        with pytest.raises(ConfigError, match=r"4 CPU devices, in groups of 2 on one node; \S+ has 3"):
            Placement(configured(address, *PAIRS), layout, CpuDevice())
        with pytest.raises(ConfigError, match=r"groups of 2 on one node"):
            Placement(configured(address, "ray.nodes_timeout_minutes=0.01", *PAIRS), layout, CpuDevice())
        with ThreadPoolExecutor() as pool:
            holding = pool.submit(Placement, waiting, layout, CpuDevice())
            cluster.add_node(num_cpus=2)  # in the main thread, as Ray wants it
            held = holding.result()
        nodes = [slot.node.id for slot in held.slots]
        assert nodes[0] == nodes[1] == ray.get_runtime_context().get_node_id()
        assert nodes[2] == nodes[3] != nodes[0]
        soon = configured(address, "rl_config.start_timeout_minutes=0.02", *PAIRS)
        with pytest.raises(
            WorkerFailed, match=r"not finished after 0.02 minutes: 1 CPU devices of the cluster are free"
        ):
            Placement(soon, layout, CpuDevice())

        theirs, ours = tmp_path / "theirs", tmp_path / "ours"
        for folder in (theirs, ours):
            folder.mkdir()
        (theirs / "rank_00002.log").write_text("what it said")
        assert collect_logs(str(theirs), str(ours)) == ["rank_00002.log"]
        assert [path.name for path in ours.iterdir()] == ["rank_00002.log"]
        assert (ours / "rank_00002.log").read_text() == "what it said"
        assert collect_logs(str(theirs), str(theirs)) == []  # a shared disk
        assert [path.name for path in theirs.iterdir()] == ["rank_00002.log"]


def test_keys_of_a_ray_that_is_started_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    spill = tmp_path / "spill"
    config = configured("ray.object_store_gib=0.1", f"ray.spill_folder={spill}")
    with _ray(config, derive_layout(config)):
        (node,) = ray.nodes()
        assert node["Resources"]["object_store_memory"] == int(0.1 * 2**30)
        kept = [ray.put(bytes(40 * 2**20)) for _ in range(4)]  # more than fits
        deadline = time.monotonic() + 60
        while not (spilled := [path for path in spill.rglob("*") if path.is_file()]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert sum(path.stat().st_size for path in spilled) >= 40 * 2**20
        del kept

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    refused = r"ray.object_store_gib = 0.1: has no effect on the cluster at 10"
    with pytest.raises(ConfigError, match=refused), _ray(config, derive_layout(config)):
        pass
    monkeypatch.delenv("RAY_ADDRESS")
    config = configured("ray.nodes_timeout_minutes=1")
    refused = r"ray.nodes_timeout_minutes = 1.0: has no effect on a Ray started here"
    with pytest.raises(ConfigError, match=refused), _ray(config, derive_layout(config)):
        pass
