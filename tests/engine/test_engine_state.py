"""What the training engine saves, loads and moves off the device."""

import json
from typing import Any

import pytest
import torch
from support.checkpoints import load, save
from support.ranks import run_ranks

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.checkpoint.state import CheckpointReader
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.types import Denominators, RolloutBatch

BATCH = RolloutBatch(
    [torch.tensor([6, 2, 7, 5]), torch.tensor([9, 1])],
    [torch.tensor([8, 3, 0]), torch.tensor([7, 0])],
    {"advantages": [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([-0.5, -0.5])]},
)


def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
    return PolicyObjective(RLConfig())(
        log_probs=outputs.log_probs,
        entropy=outputs.entropy,
        old_log_probs=None,
        ref_log_probs=None,
        advantages=torch.cat(micro.columns["advantages"]),
        mask=torch.ones_like(outputs.log_probs),
        response_lengths=micro.response_lengths,
        denominators=Denominators(5, 2),
        kl_coef=0.0,
    )


def scenario(rank: int, folder: str, settings: dict[str, Any], root: str) -> None:
    """All checks in one process: starting the engine costs more than they do."""
    from mindspeed_rl.checkpoint.hf import HFWeights
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    with open(f"{folder}/config.json") as file:
        model = ModelConfig.from_hf(json.load(file))
    # warm-up and decay make the learning rate depend on the schedule's position
    cfg = MegatronConfig(lr=1e-2, lr_warmup_fraction=0.5, lr_decay_style="cosine", **settings)
    initialize_parallel_state(cfg)

    def engine() -> MegatronEngine:
        return MegatronEngine(cfg, model, device, 8, HFWeights(folder), with_reference=False)

    def step(target: MegatronEngine) -> dict[str, float]:
        return target.train_mini_batch(BATCH, loss, [[0], [1]], 1.0, entropy=True).finalize()

    def weights(target: MegatronEngine) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in target.export_weights(1 << 20)}

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    first = engine()
    begun = save(first, f"{root}/begun")  # before the first step: there is no optimizer state yet
    learning_rates = [step(first)["actor/lr"] for _ in range(2)]
    path = save(first, f"{root}/whole")
    random_after_save = torch.rand(3)

    # going on from the state is going on, bit for bit
    resumed = engine()
    load(resumed, path)
    assert torch.equal(torch.rand(3), random_after_save)

    # of another layout there is no state of generators: they start anew, from the seed and the iteration
    drawn = [(resumed.load_rng({}, iteration), torch.rand(3))[1] for iteration in (1, 2, 1)]
    assert [torch.equal(drawn[0], other) for other in drawn] == [True, False, True]
    assert same(weights(resumed), weights(first))
    expected, found = step(first), step(resumed)
    assert found == expected
    assert found["actor/lr"] > learning_rates[1] > learning_rates[0]
    assert same(weights(resumed), weights(first))

    # without the optimizer: the same weights, but moments and schedule from the start
    fresh = engine()
    load(fresh, path, optimizer=False, rng=False)
    assert step(fresh)["actor/lr"] == learning_rates[0]
    assert not same(weights(fresh), weights(first))

    # from before the first step, also into an engine that has stepped
    for target in (engine(), fresh):
        load(target, begun)
        assert [step(target)["actor/lr"] for _ in range(3)] == [*learning_rates, found["actor/lr"]]
        assert same(weights(target), weights(first))

    # off the device and back: nothing changes; while away, the memory is gone
    before = weights(first)
    for part in ("param", "grad", "optimizer"):
        first.offload(part)
        first.offload(part)  # already away: no harm
    held = [*(p for chunk in first.actor for p in chunk.parameters()), *first.optimizer.tensors()]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    for part in ("param", "grad", "optimizer"):
        first.onload(part)
    assert same(weights(first), before)
    assert step(first) == step(resumed)
    assert same(weights(first), weights(resumed))

    # what is not there, or does not fit, is named
    partial = save(first, f"{root}/partial", optimizer=False, rng=False)
    with pytest.raises(CheckpointError, match=r"saved without optimizer state: set no_load_optim: true"):
        load(engine(), partial)
    tensors = CheckpointReader(partial).tensors
    del tensors._stored["model.model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"nothing for model\.model\.norm\.weight"):
        engine().load_state(tensors, {}, optimizer=False)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_state_goes_and_comes_back(
    distributed_optimizer: bool, bf16: bool, tiny_model_dir: Any, tmp_path: Any
) -> None:
    settings = {"use_distributed_optimizer": distributed_optimizer, "bf16": bf16}
    run_ranks(1, scenario, str(tiny_model_dir), settings, str(tmp_path))


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_state_of_shared_experts_goes_and_comes_back(distributed_optimizer: bool, tmp_path: Any) -> None:
    settings = {"use_distributed_optimizer": distributed_optimizer, "expert_model_parallel_size": 2}
    run_ranks(2, scenario, str(make_tiny_model(tmp_path / "experts", "qwen3_moe")), settings, str(tmp_path))
