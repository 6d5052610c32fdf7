"""The in-process dock and the one over Ray, for tests of what both promise."""

import pytest
import ray
import torch

from mindspeed_rl.transfer_dock.controller import Controller
from mindspeed_rl.transfer_dock.local import LocalTransferDock
from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock
from mindspeed_rl.transfer_dock.spec import DockSpec


@pytest.fixture(scope="module")
def controllers():
    """Two controllers that start afresh on `reset`: starting an actor a test would be most of the time."""
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)

    class Resettable(Controller):
        async def reset(self, spec):
            self.__init__(spec)
            return await self.endpoint()

    actor = ray.remote(Resettable).options(num_cpus=0, max_concurrency=1000)
    yield [actor.remote(DockSpec({}, {})) for _ in range(2)]
    ray.shutdown()


@pytest.fixture(params=["local", "ray"])
def new_dock(request):
    """A function that makes a dock of a `DockSpec`, up to twice a test."""
    free = list(request.getfixturevalue("controllers")) if request.param == "ray" else []

    def make(spec):
        if request.param == "local":
            return LocalTransferDock(spec)
        controller = free.pop()
        return RayTransferDock(spec, controller, ray.get(controller.reset.remote(spec)))

    return make
