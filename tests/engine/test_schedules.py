"""Learning rates of every schedule, by their formulas."""

import math

import pytest
from support.ranks import run_ranks

from mindspeed_rl.config.schema import MegatronConfig

STEPS, MIDDLE, PEAK, LEAST = 20, 12, 1e-2, 1e-3
CHANGED = {
    "lr": 2 * PEAK,
    "min_lr": 2 * LEAST,
    "lr_warmup_fraction": 0.0,
    "lr_wsd_decay_fraction": 0.5,
    "lr_wsd_decay_style": "linear",
}
SCHEDULES = {
    "constant": {"lr_decay_style": "constant"},
    "linear": {"lr_decay_style": "linear"},
    "cosine": {"lr_decay_style": "cosine"},
    "inverse-square-root": {"lr_decay_style": "inverse-square-root"},
    "WSD": {"lr_decay_style": "WSD", "lr_wsd_decay_fraction": 0.25},
    "WSD-linear": {"lr_decay_style": "WSD", "lr_wsd_decay_fraction": 0.25, "lr_wsd_decay_style": "linear"},
    "WSD-cosine": {"lr_decay_style": "WSD", "lr_wsd_decay_fraction": 0.25, "lr_wsd_decay_style": "cosine"},
}


def rates(rank: int) -> dict[str, list[float]]:
    """Of each step of each schedule, of an optimizer of one weight."""
    import torch

    from mindspeed_rl.device.select import make_device

    make_device("cpu").install()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed_rl.engine.megatron.engine import initialize_parallel_state
    from mindspeed_rl.engine.megatron.optimizer import Optimizer

    found = {}
    initialize_parallel_state(MegatronConfig())
    for name, keys in SCHEDULES.items():
        cfg = MegatronConfig(
            lr=PEAK, min_lr=LEAST, lr_warmup_fraction=0.2, use_distributed_optimizer=False, weight_decay=0.0, **keys
        )
        shape = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = DistributedDataParallel(shape, settings, torch.nn.Linear(2, 1, bias=False))
        optimizer = Optimizer(cfg, [model], STEPS)
        found[name] = [optimizer.step()[1] for _ in range(MIDDLE)]
        saved = optimizer.state_dict()
        found[name] += [optimizer.step()[1] for _ in range(STEPS + 1 - MIDDLE)]
        # a run that goes on for longer, with keys that have changed meanwhile
        longer = Optimizer(cfg.model_copy(update=CHANGED), [model], 2 * STEPS)
        longer.load_state_dict(saved)
        found[f"{name}, resumed"] = [longer.step()[1] for _ in range(STEPS + 1 - MIDDLE)]
    return found


def expected(name: str, step: int) -> float:
    """`step` steps have been taken; 4 are warm-up, and with WSD the last 5 decay."""
    if step <= 4:
        return PEAK * step / 4
    ratio, decay, over = (step - 4) / 16, max(0.0, (step - 15) / 5), PEAK - LEAST
    return {
        "constant": PEAK,
        "linear": LEAST + over * (1 - ratio),
        "cosine": LEAST + over * (1 + math.cos(math.pi * ratio)) / 2,
        "inverse-square-root": max(LEAST, PEAK * math.sqrt(4 / step)),
        "WSD": LEAST + over * (2 * 0.5**decay - 1),
        "WSD-linear": LEAST + over * (1 - decay),
        "WSD-cosine": LEAST + over * (1 + math.cos(math.pi * decay)) / 2,
    }[name]


@pytest.fixture(scope="module")
def found() -> dict[str, list[float]]:
    return run_ranks(1, rates)[0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(found: dict[str, list[float]], name: str) -> None:
    assert found[name] == pytest.approx([expected(name, step) for step in range(STEPS + 1)], rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_that_goes_on_keeps_its_schedule(found: dict[str, list[float]], name: str) -> None:
    """Its length and shape, that is; both ends of it are `lr` and `min_lr` as they are set now."""
    assert found[f"{name}, resumed"] == pytest.approx([2 * rate for rate in found[name][MIDDLE:]], rel=1e-12)
