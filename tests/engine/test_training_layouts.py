"""The training engine against transformers, and every layout against one rank, in float32."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.reference import hf_log_probs, of_responses
from transformers import AutoModelForCausalLM

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.data.packing import fixed_micro_batches, micro_batches
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.resharding.names import parameter_table
from mindspeed_rl.types import Denominators, RolloutBatch

SEQUENCES = 8
CAP = 20  # tokens of a micro-batch; sequences have up to 14
Maximum = Callable[[list[float]], list[float]]  # over data-parallel ranks
TEMPERATURE = 0.7
LOG_PROB_TOLERANCE = 2e-6  # nats; float32, another order of summation
LOSS_TOLERANCE = 1e-6
# after two Adam steps of 1e-3, which divide by the gradient's own size: where that is as small as its rounding, of
# one element of 32,768 in rings, 2e-5 are passed
WEIGHT_TOLERANCE = 5e-5
DEEP_WEIGHT_TOLERANCE = 2e-4  # of four layers: more gradients are as small as their rounding


TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP = "num_layers_per_virtual_pipeline_stage"
RING = {"context_parallel_algo": "megatron_cp_algo"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Micro:
    """Micro-batches of `size` sequences, or of at most `max_tokens` tokens and equally many on every rank."""

    size: int = 1
    max_tokens: int | None = None

    def __str__(self) -> str:
        return f"micro{self.size}" if self.max_tokens is None else f"cap{self.max_tokens}"

    def of(self, batch: RolloutBatch, maximum: Maximum) -> list[list[int]]:
        if self.max_tokens is None:
            return fixed_micro_batches(len(batch), self.size)
        alone = len(micro_batches(batch.lengths, self.max_tokens))
        return micro_batches(batch.lengths, self.max_tokens, int(maximum([alone])[0]))


@dataclass(frozen=True)
class Layout:
    world: int
    settings: dict[str, Any]
    micro: Micro

    def __str__(self) -> str:
        named = {TP: "TP", PP: "PP", VPP: "VPP", "context_parallel_size": "CP", "sequence_parallel": "SP"}
        named["context_parallel_algo"] = ""
        parts = [f"{named.get(key, key)}{value}" for key, value in self.settings.items()]
        return "-".join([f"world{self.world}", *parts, str(self.micro)])


def layout(world: int, micro_batch_size: int = 2, max_tokens: int | None = None, **settings: Any) -> Layout:
    return Layout(world, settings, Micro(micro_batch_size, max_tokens))


LAYOUTS = [
    layout(2),
    layout(2, use_distributed_optimizer=False),
    layout(2, 3, **{TP: 2}),
    layout(2, 3, **{TP: 2}, sequence_parallel=True),
    layout(2, **{PP: 2}),
    layout(4, 3, **{TP: 2, PP: 2}),
    layout(2, 3, context_parallel_size=2),
    layout(4, 3, **{TP: 2}, context_parallel_size=2, sequence_parallel=True),
    layout(4, max_tokens=CAP, context_parallel_size=2, use_distributed_optimizer=False),
    layout(4, 3, **{TP: 2}, context_parallel_size=2, sequence_parallel=True, **RING),
    layout(4, max_tokens=CAP, context_parallel_size=2, use_distributed_optimizer=False, **RING),
    layout(3, 4, context_parallel_size=3, **RING, **RECOMPUTED),  # a number of parts that does not divide the heads
    layout(2, overlap_grad_reduce=True),
    layout(2, overlap_grad_reduce=True, overlap_param_gather=True),
    layout(4, max_tokens=CAP, **{PP: 2}),
    layout(1, 4, **RECOMPUTED),
    layout(1, 4, recompute_granularity="selective"),
    layout(2, 4, **{TP: 2}, sequence_parallel=True, **{**RECOMPUTED, "recompute_method": "block"}),
]


# stages that are divided, or of different sizes: for a model of four layers
DEEP_LAYOUTS = [
    layout(2, 3, **{PP: 2, VPP: 1}),  # 3 micro-batches: an empty one is added
    layout(4, 2, **{PP: 2, VPP: 1}, overlap_grad_reduce=True, overlap_param_gather=True),
    layout(2, 2, **{PP: 2, VPP: 1}, **RECOMPUTED),
    layout(2, **{PP: 2}, num_layer_list="3,1"),
    layout(2, **{PP: 2}, noop_layers="1,3"),
]


def make_batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)

    def tokens(longest: int) -> torch.Tensor:
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        return torch.randint(1, 16, (length,), generator=generator)

    responses = [tokens(8) for _ in range(SEQUENCES)]
    columns = {
        "advantages": [torch.randn(len(r), generator=generator) for r in responses],
        "loss_mask": [torch.ones(len(r)) for r in responses],
        "reference_log_probs": [-torch.rand(len(r), generator=generator) - 2.5 for r in responses],
    }
    columns["loss_mask"][2].zero_()  # a sample whose scoring failed
    return RolloutBatch([tokens(6) for _ in range(SEQUENCES)], responses, columns)


def objective_loss(objective: PolicyObjective, denominators: Denominators) -> Any:
    def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
        columns = {name: torch.cat(values) for name, values in micro.columns.items()}
        return objective(
            log_probs=outputs.log_probs,
            entropy=outputs.entropy,
            old_log_probs=None,
            ref_log_probs=columns["reference_log_probs"],
            advantages=columns["advantages"],
            mask=columns["loss_mask"],
            response_lengths=micro.response_lengths,
            denominators=denominators,
            kl_coef=0.1,
        )

    return loss


def train(
    rank: int, folder: str, settings: dict[str, Any], micro: Micro, steps: int, refused: bool = False
) -> dict[str, Any]:
    """Log-probs, then `steps` optimizer steps, on one rank; `refused`: each after one that is not taken."""
    from mindspeed_rl.checkpoint.hf import HFWeights
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state
    from mindspeed_rl.engine.megatron.model import named_parameters

    with open(f"{folder}/config.json") as file:
        model = ModelConfig.from_hf(json.load(file))
    cfg = MegatronConfig(**{"lr": 1e-3, "clip_grad": 0.0, **settings})
    initialize_parallel_state(cfg)
    engine = MegatronEngine(cfg, model, device, 10, HFWeights(folder), with_reference=True)
    share = SEQUENCES // engine.data_parallel_size
    mine = make_batch().select(range(SEQUENCES)[engine.data_parallel_rank * share :][:share])
    chosen = micro.of(mine, engine.max_over_data_parallel)
    result: dict[str, Any] = {
        "output": engine.is_output_rank,
        "data_rank": engine.data_parallel_rank,
        "micro_batches": chosen,
        "log_probs": engine.score(mine, chosen, TEMPERATURE),
        "reference": engine.score(mine, chosen, TEMPERATURE, reference=True),
        "loaded": {name: tensor.clone() for name, tensor in engine.export_weights(1 << 14)},
        "metrics": [],
    }
    tokens = engine.sum_over_data_parallel([float(torch.cat(mine.columns["loss_mask"]).sum())])[0]
    loss = objective_loss(PolicyObjective(RLConfig(entropy_coeff=0.01)), Denominators(tokens, SEQUENCES - 1))
    for step in range(steps):
        if refused:
            limit = ("actor/imp_ratio", 0.5)  # it is 1
            given_up = engine.train_mini_batch(mine, loss, chosen, TEMPERATURE, entropy=True, limit=limit)
            assert given_up.finalize()["actor/early_stopped"] == 1
        result["metrics"].append(engine.train_mini_batch(mine, loss, chosen, TEMPERATURE, entropy=True))
        if step == 0 and (engine.data_parallel_size == 1 or not cfg.use_distributed_optimizer):
            result["gradients"] = {
                name: parameter.main_grad.clone()
                for name, parameter in named_parameters(
                    [chunk.module for chunk in engine.actor], model, engine.layout
                )
                if parameter.requires_grad
            }
    result["weights"] = {name: tensor.clone() for name, tensor in engine.export_weights(1 << 14)}
    return result


def gather(results: list[dict[str, Any]], key: str) -> torch.Tensor:
    """[R] values of all data-parallel ranks in order."""
    by_rank = {result["data_rank"]: result[key].log_probs for result in results if result["output"]}
    return torch.cat([by_rank[rank] for rank in sorted(by_rank)])


def merged(results: list[dict[str, Any]], step: int) -> dict[str, float]:
    metrics = MetricSet()
    for result in results:
        metrics.merge(result["metrics"][step])
    return metrics.finalize()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    # tied embeddings: the case in which pipeline stages share a weight and its gradient
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tied", tie=True))


@pytest.fixture(scope="module")
def one_rank(folder: str) -> list[dict[str, Any]]:
    return run_ranks(1, train, folder, {}, Micro(SEQUENCES), 2)


def test_overlapped_gathering_is_waited_for_by_the_output_layer(folder: str) -> None:
    """On the last stage its weights are a bucket of their own, which nothing but their use waits for."""
    settings = {PP: 2, "overlap_grad_reduce": True, "overlap_param_gather": True}
    found, one_rank = run_ranks(4, train, folder, settings, Micro(1), 4), run_ranks(1, train, folder, {}, Micro(1), 4)
    for step in range(4):
        expected = merged(one_rank, step)
        for name in ("actor/loss", "actor/grad_norm"):
            assert merged(found, step)[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), (step, name)


@pytest.mark.parametrize("settings", [{}, {TP: 2, "sequence_parallel": True}], ids=["one rank", "TP2"])
def test_a_refused_step_leaves_no_trace(settings: dict[str, Any], folder: str) -> None:
    """Neither in weights nor in what the optimizer remembers: what follows is the same to the last bit."""
    world = settings.get(TP, 1)
    plain, after = (
        run_ranks(world, train, folder, settings, Micro(SEQUENCES), 2, refused) for refused in (False, True)
    )
    for expected, found in zip(plain, after, strict=True):
        assert all(torch.equal(found["weights"][name], weight) for name, weight in expected["weights"].items())
        assert [m.finalize() for m in found["metrics"]] == [m.finalize() for m in expected["metrics"]]


def textbook_loss(model: torch.nn.Module) -> torch.Tensor:
    """The loss that `train` minimises, of a Hugging Face model on the same batch."""
    batch = make_batch()
    all_log_probs = hf_log_probs(model, batch, TEMPERATURE)
    log_probs = of_responses(all_log_probs, batch)
    columns = {name: torch.cat(values) for name, values in batch.columns.items()}
    entropy = torch.cat([-(lp.exp() * lp).sum(-1) for lp in all_log_probs])
    difference = columns["reference_log_probs"] - log_probs
    k3 = difference.exp() - difference - 1
    ratio = (log_probs - log_probs.detach()).exp()
    per_token = -columns["advantages"] * ratio + 0.1 * k3 - 0.01 * entropy
    return (per_token * columns["loss_mask"]).sum() / columns["loss_mask"].sum()


def assert_trained_the_same(
    results: list[dict[str, Any]], one_rank: list[dict[str, Any]], weight_tolerance: float
) -> None:
    """Log-probs, metrics of two steps and weights after them."""
    for key in ("log_probs", "reference"):
        torch.testing.assert_close(gather(results, key), gather(one_rank, key), atol=LOG_PROB_TOLERANCE, rtol=0)
    for step in range(2):
        found, expected = merged(results, step), merged(one_rank, step)
        for name in ("actor/loss", "actor/pg_loss", "actor/kl", "actor/entropy", "actor/grad_norm"):
            assert found[name] == pytest.approx(expected[name], abs=LOSS_TOLERANCE, rel=1e-6), (step, name)
    for rank, result in enumerate(results):
        for name, weight in one_rank[0]["weights"].items():
            torch.testing.assert_close(
                result["weights"][name],
                weight,
                atol=weight_tolerance,
                rtol=0,
                msg=lambda m: f"rank {rank}: {m}",  # noqa: B023
            )


def test_gradient_equals_autograd_of_the_textbook_loss(folder: str, one_rank: list[dict[str, Any]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    loss = textbook_loss(model)
    loss.backward()
    assert merged(one_rank, 0)["actor/loss"] == pytest.approx(loss.item(), abs=LOSS_TOLERANCE)

    hf_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with open(f"{folder}/config.json") as file:
        table = parameter_table(ModelConfig.from_hf(json.load(file)))
    for parameter in table:
        expected = parameter.from_hf([hf_gradients[name] for name in parameter.hf_names])
        torch.testing.assert_close(one_rank[0]["gradients"][parameter.name], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("world", "micro"),
    [
        (1, Micro(1)),
        (1, Micro(2)),
        (1, Micro(4)),
        (1, Micro(max_tokens=CAP)),
        (2, Micro(3)),
        (2, Micro(max_tokens=CAP)),
    ],
    ids=str,
)
def test_gradient_does_not_depend_on_the_micro_batch(
    world: int, micro: Micro, folder: str, one_rank: list[dict[str, Any]]
) -> None:
    results = run_ranks(world, train, folder, {"use_distributed_optimizer": False}, micro, 1)
    assert len({len(result["micro_batches"]) for result in results}) == 1
    for result in results:
        for name, expected in one_rank[0]["gradients"].items():
            torch.testing.assert_close(result["gradients"][name], expected, atol=1e-6, rtol=0)


def test_ranks_of_the_capped_case_would_make_different_numbers_of_micro_batches() -> None:
    lengths = make_batch().lengths
    first, second = lengths[: SEQUENCES // 2], lengths[SEQUENCES // 2 :]
    assert len(micro_batches(first, CAP)) != len(micro_batches(second, CAP))
    order = list(chain(*micro_batches(lengths, CAP)))
    assert order != sorted(order)  # log-probs have to be put back into the batch's order


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_layouts_agree_with_one_rank(case: Layout, folder: str, one_rank: list[dict[str, Any]]) -> None:
    results = run_ranks(case.world, train, folder, case.settings, case.micro, 2)
    assert_trained_the_same(results, one_rank, WEIGHT_TOLERANCE)


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "deep", tie=True, layers=4))


@pytest.fixture(scope="module")
def deep_one_rank(deep_folder: str) -> list[dict[str, Any]]:
    return run_ranks(1, train, deep_folder, {}, Micro(SEQUENCES), 2)


@pytest.mark.parametrize("case", DEEP_LAYOUTS, ids=str)
def test_divided_and_uneven_stages_agree_with_one_rank(
    case: Layout, deep_folder: str, deep_one_rank: list[dict[str, Any]]
) -> None:
    results = run_ranks(case.world, train, deep_folder, case.settings, case.micro, 2)
    assert_trained_the_same(results, deep_one_rank, DEEP_WEIGHT_TOLERANCE)
