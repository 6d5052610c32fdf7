"""Before the first update the actor is its old policy and its reference: to the last bit, in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from test_training_layouts import CAP, PP, TEMPERATURE, TP, Layout, layout, make_batch

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.types import Denominators, RolloutBatch

LAYOUTS = [
    layout(1, 4),
    layout(2, 3, **{TP: 2}, sequence_parallel=True),
    layout(2, max_tokens=CAP, **{PP: 2}),
    layout(2, max_tokens=CAP, context_parallel_size=2),
]


def two_steps(rank: int, folder: str, case: Layout) -> dict[str, Any]:
    """Log-probs of actor and reference, and metrics of two updates with them."""
    from mindspeed_rl.checkpoint.hf import HFWeights
    from mindspeed_rl.config.model import ModelConfig
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    cfg = MegatronConfig(**{"lr": 1e-3, "clip_grad": 0.0, **case.settings})
    initialize_parallel_state(cfg)
    model = ModelConfig.from_hf(json.loads(Path(folder, "config.json").read_text()))
    engine = MegatronEngine(cfg, model, device, 10, HFWeights(folder), with_reference=True)
    batch = make_batch()
    passes = case.micro.of(batch, engine.max_over_data_parallel)
    scored: dict[str, torch.Tensor] = {}
    for name, reference in (("old_log_probs", False), ("reference_log_probs", True)):
        outputs = engine.score(batch, passes, TEMPERATURE, reference=reference)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, outputs and outputs.log_probs)  # the dock's part in a run
        scored[name] = next(values for values in of_ranks if values is not None)
        batch.columns[name] = list(scored[name].split(batch.response_lengths.tolist()))
    counted = float(torch.cat(batch.columns["loss_mask"]).sum())
    objective = PolicyObjective(RLConfig(clip_ratio=1e-9))

    def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
        columns = {name: torch.cat(values) for name, values in micro.columns.items()}
        return objective(
            log_probs=outputs.log_probs,
            entropy=None,
            old_log_probs=columns["old_log_probs"],
            ref_log_probs=columns["reference_log_probs"],
            advantages=columns["advantages"],
            mask=columns["loss_mask"],
            response_lengths=micro.response_lengths,
            denominators=Denominators(counted, len(batch) - 1),
            kl_coef=0.1,
        )

    steps = [engine.train_mini_batch(batch, loss, passes, TEMPERATURE, entropy=False) for _ in range(2)]
    return {"scored": scored, "metrics": [step.finalize() for step in steps] if engine.is_output_rank else None}


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_nothing_has_moved_before_the_first_update(case: Layout, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    results = run_ranks(case.world, two_steps, str(folder), case)
    scored = results[0]["scored"]
    assert torch.equal(scored["old_log_probs"], scored["reference_log_probs"])
    first, second = next(result["metrics"] for result in results if result["metrics"])
    for name in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/kl"):
        assert first[name] == 0.0, name
        assert second[name] != 0.0, name  # the measure is not blind: clip_ratio is next to 0
