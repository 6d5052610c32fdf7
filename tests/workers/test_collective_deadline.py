"""`distributed_timeout_minutes`: a rank that does not come ends the wait of the others."""

import time

from support.ranks import run_ranks

from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.workers.context import Context
from mindspeed_rl.workers.control import ControlGroup


def wait_for_the_other(rank: int) -> str | None:
    """What rank 1 says about rank 0, which does not take part."""
    from mindspeed_rl.device.select import make_device

    config = Config(megatron_training={}, actor_config={"distributed_timeout_minutes": 0.02})
    context = Context(rank, rank, config, derive_layout(config), make_device("cpu"), None)
    group = ControlGroup([[0, 1]], rank, context.collective_minutes)
    if rank == 0:
        time.sleep(4)
        return None
    try:
        group.share(lambda: None)
    except RuntimeError as error:
        return str(error)
    return None


def test_the_wait_ends() -> None:
    _, said = run_ranks(2, wait_for_the_other)
    assert said is not None
    assert "1200ms" in said  # 0.02 minutes
