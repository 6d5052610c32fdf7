"""Megatron-core over hccl on simulated NPUs: each way to divide a model trains the same."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.device.npu import NpuDevice
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.engine.megatron.bootstrap import prepare
from mindspeed_rl.types import Denominators, RolloutBatch
from tests.engine.test_training_layouts import SEQUENCES, make_batch, objective_loss
from tests.support.ranks import leave_parallel_state
from tests.support.simulated_npu import Ranks, ranks

TP, PP, EP, CP = (f"{way}_parallel_size" for way in ("tensor_model", "pipeline_model", "expert_model", "context"))
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [OVERLAPPED, {TP: 2, "sequence_parallel": True}, {PP: 2}, {CP: 2}],
    "qwen3_moe": [{EP: 2}, {TP: 2, "sequence_parallel": True}],
    "deepseek_v3": [{TP: 2, "sequence_parallel": True}],
}


def _train(folder: str, settings: dict[str, Any]) -> tuple[float, float] | None:
    """Norm of the gradient, and the sum of log-probs after a step and a trip of everything to the host and back."""
    device = NpuDevice()
    cfg, weights = MegatronConfig(lr=1e-3, **settings), HFWeights(folder)
    prepare(device, cfg)
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    initialize_parallel_state(cfg)
    try:
        engine = MegatronEngine(cfg, ModelConfig.from_hf(weights.config()), device, 10, weights, with_reference=False)
        share = SEQUENCES // engine.data_parallel_size
        mine = make_batch().select(range(SEQUENCES)[engine.data_parallel_rank * share :][:share])
        passes = [list(range(share // 2)), list(range(share // 2, share))]
        objective = objective_loss(PolicyObjective(RLConfig()), Denominators(20.0, SEQUENCES))

        def loss(micro: RolloutBatch, outputs: TokenOutputs) -> Any:
            assert outputs.log_probs is not None
            where = outputs.log_probs.device
            columns = {name: [value.to(where) for value in values] for name, values in micro.columns.items()}
            return objective(replace(micro, columns=columns), outputs)

        metrics = engine.train_mini_batch(mine, loss, passes, 1.0, entropy=False).finalize()
        exported = dict(engine.export_weights(1 << 14))
        assert sorted(exported) == sorted(weights.names)
        assert {tensor.device.type for tensor in exported.values()} == {"npu"}
        for move in (engine.offload, engine.onload):
            for part in ("param", "grad", "optimizer"):
                move(part)
        outputs = engine.score(mine, passes, 1.0)
        total = 0.0 if outputs is None or outputs.log_probs is None else float(outputs.log_probs.sum())
        total = engine.sum_over_data_parallel([total])[0]
        return (metrics["actor/grad_norm"], total) if engine.is_output_rank else None
    finally:
        leave_parallel_state()


@pytest.fixture(scope="module")
def npus() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_layouts_agree_with_data_parallelism(architecture: str, npus: Ranks, tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path / "model", architecture))
    (expected, same) = npus.run(_train, folder, {})
    assert expected == same
    for settings in LAYOUTS[architecture]:
        found = [result for result in npus.run(_train, folder, settings) if result]
        assert found == [pytest.approx(expected, rel=2e-4)] * len(found), settings
        assert found
