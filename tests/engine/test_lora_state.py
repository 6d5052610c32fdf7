"""What an engine with adapters keeps, moves and leaves out: reference, critic's head, precision, memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import load, save
from support.ranks import leave_parallel_state, run_ranks
from test_engine_state import BATCH, loss
from test_shared_critic import PASSES, batch_with_returns, loss_of

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import CheckpointReader
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.resharding.checksums import differing, with_checksums
from mindspeed_rl.types import Denominators, RolloutBatch

torch.set_num_threads(1)
LORA = {"lora_r": 2, "lora_alpha": 4.0, "lr": 1e-2}
PARTS = ("param", "grad", "optimizer", "reference")


class Engines:
    """Makes engines of one model on one rank."""

    def __init__(self, folder: str):
        from mindspeed_rl.device.select import make_device
        from mindspeed_rl.engine.megatron import critic, engine

        self.device, self.folder = make_device("cpu"), folder
        self.device.install()
        self.kinds = {
            "actor": engine.MegatronEngine,
            "shared": critic.ActorCriticEngine,
            "critic": critic.CriticEngine,
        }
        self.start = engine.initialize_parallel_state
        self.model = ModelConfig.from_hf(json.loads(Path(folder, "config.json").read_text()))

    def make(self, kind: str = "actor", reference: bool = False, **settings: Any) -> Any:
        cfg = MegatronConfig(**{**LORA, **settings})
        leave_parallel_state()
        self.start(cfg)
        further = {} if kind == "critic" else {"with_reference": reference}
        return self.kinds[kind](cfg, self.model, self.device, 8, HFWeights(self.folder), **further)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights(1 << 20)}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_memory_comes_and_goes(engine: Any) -> None:
    """Base and adapters are "param", and "reference" is nothing."""
    before = weights(engine)
    for _ in range(2):
        for part in PARTS:
            engine.offload(part)
            engine.offload(part)
        held = [*(p for chunk in engine.actor for p in chunk.parameters()), *engine.optimizer.tensors()]
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
        for part in PARTS:
            engine.onload(part)
        assert_same(weights(engine), before)
        engine.train_mini_batch(BATCH, loss, [[0], [1]], 1.0, entropy=True)
        before = weights(engine)  # the base's copy on the host is not made anew


def state(rank: int, folder: str, settings: dict[str, Any], root: str) -> None:
    engines = Engines(folder)
    first = engines.make(**settings)
    start = HFWeights(folder)
    assert_same(weights(first), {name: start.tensor(name).to(weights(first)[name].dtype) for name in start.names})
    untrained = first.score(BATCH, [[0, 1]], 1.0)
    assert torch.equal(untrained.log_probs, first.score(BATCH, [[0, 1]], 1.0, reference=True).log_probs)
    for _ in range(2):
        first.train_mini_batch(BATCH, loss, [[0], [1]], 1.0, entropy=True)
    names = {name.rpartition(".")[2] for name, p in first._actor_parameters().items() if p.requires_grad}
    assert names == {"a", "b"}
    frozen = [p for p in first._actor_parameters().values() if not p.requires_grad]
    assert all(not hasattr(p, "main_grad") and p.grad is None for p in frozen)
    trained = sum(p.numel() for p in first._actor_parameters().values() if p.requires_grad)
    assert sum(shard.main.numel() for shard in first.optimizer.shards()) == trained

    sums: dict[str, torch.Tensor] = {}
    found = {name: tensor.clone() for name, tensor in with_checksums(first.export_weights(1 << 12), sums)}
    assert differing(first.weight_checksums(), sums) == []
    path = save(first, f"{root}/first")
    again = engines.make(**settings, seed=7)  # other adapters: what is not loaded is seen
    assert not torch.equal(next(iter(drawn(again))), next(iter(drawn(first))))
    load(again, path)
    assert_same(weights(again), found)
    assert again.train_mini_batch(BATCH, loss, [[0], [1]], 1.0, entropy=True).finalize() == (
        first.train_mini_batch(BATCH, loss, [[0], [1]], 1.0, entropy=True).finalize()
    )
    assert_same(weights(again), weights(first))
    assert_memory_comes_and_goes(first)
    with pytest.raises(CheckpointError, match=r"nothing for model\.model\.embed_tokens\.weight"):
        load(engines.make(lora_r=0, **settings), path)
    with pytest.raises(CheckpointError, match=r"shape \(2, 128\) for .*lora_A.weight, expected shape \(4, 128\)"):
        load(engines.make(**{**settings, "lora_r": 4}), path)


def drawn(engine: Any) -> list[torch.Tensor]:
    return [p for name, p in engine._actor_parameters().items() if name.endswith("adapter.a")]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_adapters_go_and_come_back(
    distributed_optimizer: bool, bf16: bool, tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = {"use_distributed_optimizer": distributed_optimizer, "bf16": bf16}
    run_ranks(1, state, str(tiny_model_dir), settings, str(tmp_path))


def roles(rank: int, folder: str, root: str) -> None:
    engines = Engines(folder)

    # the KL over the vocabulary is to the model without adapters: as to a copy that was never trained
    def kl_loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
        return PolicyObjective(RLConfig(kl_penalty="full"))(
            outputs.log_probs,
            None,
            None,
            None,
            torch.cat(micro.columns["advantages"]),
            torch.ones_like(outputs.log_probs),
            micro.response_lengths,
            Denominators(5, 2),
            kl_coef=0.1,
            full_kl=outputs.kl,
        )

    of_kinds = []
    for reference in (False, True):
        engine = engines.make(reference=reference)
        assert len(engine.reference) == reference
        steps = [engine.train_mini_batch(BATCH, kl_loss, [[0], [1]], 1.0, entropy=False, kl=True) for _ in range(3)]
        of_kinds.append([step.finalize()["actor/kl"] for step in steps])
    assert of_kinds[0] == of_kinds[1]
    assert of_kinds[0][0] == 0
    assert of_kinds[0][2] > 1e-6

    # a value head trains in full, beside adapters, and is saved where it is without them
    batch = batch_with_returns()
    shared = engines.make("shared")
    both = loss_of(float(torch.cat(batch.columns["loss_mask"]).sum()))
    for _ in range(2):
        shared.train_mini_batch(batch, both, PASSES, 1.0, entropy=True)
    path = save(shared, f"{root}/shared")
    names = CheckpointReader(path).tensors.names()
    assert {name for name in names if "score" in name} >= {"value_head.model.score.weight"}
    assert all(name.startswith(("lora.", "value_head.")) for name in names)
    values = shared.score(batch, PASSES, 1.0).values
    assert values.any()
    again = engines.make("shared", seed=7)
    load(again, path)
    assert torch.equal(again.score(batch, PASSES, 1.0).values, values)

    def value_loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
        return (outputs.values - 1).square().sum(), MetricSet()

    critic = engines.make("critic")
    for _ in range(2):
        critic.train_mini_batch(batch, value_loss, PASSES, 1.0, entropy=False)
    path = save(critic, f"{root}/critic")
    assert all(name.startswith("critic.lora.") for name in CheckpointReader(path).tensors.names())
    values = critic.score(batch, PASSES, 1.0).values
    again = engines.make("critic", seed=7)
    load(again, path)
    assert torch.equal(again.score(batch, PASSES, 1.0).values, values)
    assert sorted(weights(again)) == sorted(critic.weight_checksums())


def test_reference_and_critics(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=64, ffn=64)
    run_ranks(1, roles, str(folder), str(tmp_path))
