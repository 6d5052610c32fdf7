"""The environment that a run's configuration asks for, in real Ray actors and tasks."""

import os
from typing import Any

import pytest
import ray

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.trainer.launch import _ray
from mindspeed_rl.workers.group import Watch, WorkerGroup
from mindspeed_rl.workers.placement import Placement

NAMES = ("MINE", "OMP_NUM_THREADS")


def test_every_process_of_a_run_has_the_variables(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def __init__(self, *_: Any):
            self.found = {name: os.environ.get(name) for name in NAMES}

        def environment(self) -> dict[str, str | None]:
            return self.found

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    preset = "grpo_trainer_tiny_cpu"
    cfg, _ = load_config(preset, ["runtime_env.env_vars.MINE=7", "runtime_env.env_vars.OMP_NUM_THREADS=3"])
    plain, _ = load_config(preset)
    layout, model = derive_layout(cfg), resolve_model(cfg)
    with _ray(cfg, layout):
        for config, threads in ((cfg, "3"), (plain, "1")):
            watch = Watch(1)
            worker: Any = Worker
            group = WorkerGroup(
                worker,
                1,
                0,
                watch,
                config,
                layout,
                model,
                CpuDevice(),
                Placement(config, layout, CpuDevice()),
                str(tmp_path),
            )
            found = watch.wait(group.start("environment", 0, "environment"))
            # of a job that was started with the variables; a worker's own come last
            assert found == [{"MINE": "7", "OMP_NUM_THREADS": threads}]
        task: Any = ray.remote(lambda: [os.environ.get(name) for name in (*NAMES, "PYTHONPATH")])
        mine, threads, path = ray.get(task.remote())
        assert (mine, threads) == ("7", "3")
        assert path.split(os.pathsep)[0] == os.getcwd()
