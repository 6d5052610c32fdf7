"""The dock's controller as a Ray actor. Metadata only: payloads stay in the object store of whoever puts them."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback

import ray

from mindspeed_rl.transfer_dock.server import DockServer
from mindspeed_rl.transfer_dock.spec import DockSpec
from mindspeed_rl.transfer_dock.wire import Endpoint


class Controller:
    """Ray places the actor, says where it is and tells everybody when it dies; requests go to its `DockServer`."""

    def __init__(self, spec: DockSpec):
        self._server = DockServer(spec)
        threading.Thread(target=self._serve, name="dock", daemon=True).start()

    def _serve(self) -> None:
        try:
            self._server.run()
        finally:  # it never ends but by an error; clients must see a dead actor and not wait for answers
            traceback.print_exc()
            os._exit(1)

    async def endpoint(self) -> Endpoint:
        """How to reach the server."""
        return Endpoint(ray.util.get_node_ip_address(), self._server.port, self._server.key)

    async def lifetime(self) -> None:
        """Answers never: whoever waits for it learns when the controller dies."""
        await asyncio.Event().wait()
