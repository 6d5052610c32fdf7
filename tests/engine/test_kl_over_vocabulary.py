"""KL to the reference over the vocabulary in the engine: against transformers in float64, and in every layout."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Worlds, run_ranks
from support.reference import hf_log_probs
from test_experts import EP
from test_training_layouts import CAP, PP, SEQUENCES, TEMPERATURE, TP, VPP, Layout, layout, make_batch
from transformers import AutoModelForCausalLM

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.types import Denominators, RolloutBatch

KL_COEF = 0.5
TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 2e-4  # as in `test_training_layouts` for four layers
MODELS: dict[str, dict[str, Any]] = {"tied": {"tie": True, "layers": 4}, "experts": {"architecture": "qwen3_moe"}}
LAYOUTS = {
    "tied": [
        layout(1, SEQUENCES),
        layout(2, 3, **{PP: 2, VPP: 1}),  # 3 micro-batches: an empty one is added
        layout(2, 3, **{TP: 2}, sequence_parallel=True, recompute_granularity="selective"),
        layout(2, max_tokens=CAP, context_parallel_size=2),
    ],
    "experts": [layout(1, 3), layout(2, 2, **{EP: 2})],
}


def start(device: Any, folder: str, case: Layout) -> Any:
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    cfg = MegatronConfig(**{"lr": 3e-3, "adam_eps": 1e-3, "clip_grad": 0.0, **case.settings})
    initialize_parallel_state(cfg)
    weights = HFWeights(folder)
    return MegatronEngine(cfg, ModelConfig.from_hf(weights.config()), device, 10, weights, with_reference=True)


def steps(engine: Any, case: Layout) -> dict[str, Any]:
    """Metrics of two optimizer steps, and the weights before the second one and after it."""
    batch = make_batch()
    mine = batch.select(range(engine.data_parallel_rank, SEQUENCES, engine.data_parallel_size))
    tokens = float(torch.cat(batch.columns["loss_mask"]).sum())
    objective, denominators = PolicyObjective(RLConfig(kl_penalty="full")), Denominators(tokens, SEQUENCES - 1)

    def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
        advantages, mask = (torch.cat(micro.columns[name]) for name in ("advantages", "loss_mask"))
        return objective(
            log_probs=outputs.log_probs,
            entropy=outputs.entropy,
            old_log_probs=None,
            ref_log_probs=None,
            advantages=advantages,
            mask=mask,
            response_lengths=micro.response_lengths,
            denominators=denominators,
            kl_coef=KL_COEF,
            full_kl=outputs.kl,
        )

    passes = case.micro.of(mine, engine.max_over_data_parallel)
    found: dict[str, Any] = {"metrics": []}
    for _ in range(2):
        found["before"] = {name: tensor.clone() for name, tensor in engine.export_weights(1 << 20)}
        of_ranks: list[Any] = [None] * dist.get_world_size()
        own = engine.train_mini_batch(mine, loss, passes, TEMPERATURE, entropy=False, kl=True)
        dist.all_gather_object(of_ranks, own)
        whole = MetricSet()
        for each in of_ranks:
            whole.merge(each)
        found["metrics"].append(whole.finalize())
    found["after"] = {name: tensor.clone() for name, tensor in engine.export_weights(1 << 20)}
    return found


def train(rank: int, folders: dict[str, str], root: str) -> dict[str, list[dict[str, Any]]]:
    """What all layouts of each model do, in one start of the ranks."""
    worlds, found = Worlds(rank, 2, root), {}
    for name, folder in folders.items():
        found[name] = []
        for case in LAYOUTS[name]:
            with worlds.world(case.world) as here:
                if here:
                    engine = start(worlds.device, folder, case)
                    found[name].append(steps(engine, case))
                    if name == "tied" and case.world == 1:
                        found[name][0]["gradients"] = {
                            name: parameter.main_grad.clone()
                            for name, parameter in engine.actor[0].module.named_parameters()
                        }
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(make_tiny_model(root / name, **settings)) for name, settings in MODELS.items()}


@pytest.fixture(scope="module")
def trained(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = run_ranks(2, train, folders, str(tmp_path_factory.mktemp("worlds")))[0]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_first_step_has_exactly_no_kl_and_layouts_agree(name: str, trained: Any) -> None:
    one, *others = trained[name]
    assert len(others) == len(LAYOUTS[name]) - 1
    assert one["metrics"][1]["actor/kl"] > 1e-4
    for found in (one, *others):
        assert found["metrics"][0]["actor/kl"] == 0.0
    for found in others:
        for step in range(2):
            for key in ("actor/kl", "actor/loss", "actor/grad_norm"):
                expected = one["metrics"][step][key]
                assert found["metrics"][step][key] == pytest.approx(expected, abs=TOLERANCE, rel=1e-5), (step, key)
        for key, weight in one["after"].items():
            torch.testing.assert_close(found["after"][key], weight, atol=WEIGHT_TOLERANCE, rtol=0)


def test_value_and_gradient_equal_autograd_of_transformers_in_float64(folders: Any, trained: Any) -> None:
    one, batch = trained["tied"][0], make_batch()
    reference = AutoModelForCausalLM.from_pretrained(folders["tied"]).double()
    policy = AutoModelForCausalLM.from_pretrained(folders["tied"]).double()
    policy.load_state_dict({name: tensor.double() for name, tensor in one["before"].items()}, strict=False)
    with torch.no_grad():
        of_reference = torch.cat(hf_log_probs(reference, batch, TEMPERATURE))
    log_p = torch.cat(hf_log_probs(policy, batch, TEMPERATURE))
    kl = (log_p.exp() * (log_p - of_reference)).sum(-1)
    own = log_p.gather(1, torch.cat(batch.responses)[:, None])[:, 0]
    advantages, mask = (torch.cat(batch.columns[name]).double() for name in ("advantages", "loss_mask"))
    per_token = KL_COEF * kl - advantages * (own - own.detach()).exp()
    ((per_token * mask).sum() / mask.sum()).backward()
    mean = float((kl.detach() * mask).sum() / mask.sum())
    assert one["metrics"][1]["actor/kl"] == pytest.approx(mean, rel=1e-4, abs=1e-7)
    gradients = dict(policy.named_parameters())
    for ours, theirs in {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "decoder.layers.1.mlp.linear_fc2.weight": "model.layers.1.mlp.down_proj.weight",
    }.items():
        expected = gradients[theirs].grad
        torch.testing.assert_close(one["gradients"][ours].double(), expected, atol=2e-6, rtol=1e-4)
