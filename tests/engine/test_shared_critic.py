"""Policy and critic on the same layers: values, and the gradient of both losses, against transformers in float64."""

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.reference import hf_log_probs, of_responses
from test_training_layouts import SEQUENCES, TEMPERATURE, make_batch
from transformers import AutoModelForCausalLM

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.algorithms.policy_objective import PolicyObjective
from mindspeed_rl.algorithms.value_objective import ValueObjective
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.engine.base import TokenOutputs
from mindspeed_rl.resharding.names import parameter_table
from mindspeed_rl.types import Denominators, RolloutBatch

VALUE_COEF, ENTROPY_COEF, CLIP_RANGE = 0.7, 0.01, 0.05
HEAD = "value_head.weight"
PASSES = [[0, 3, 5], [1, 2, 4, 6, 7]]
Values = list[torch.Tensor]


def batch_with_returns() -> RolloutBatch:
    batch, generator = make_batch(), torch.Generator().manual_seed(4)
    batch.columns["returns"] = [torch.randn(len(r), generator=generator) for r in batch.responses]
    batch.columns["values"] = [0.1 * torch.randn(len(r), generator=generator) for r in batch.responses]
    return batch


def loss_of(tokens: float) -> Any:
    cfg = RLConfig(adv_estimator="gae", entropy_coeff=ENTROPY_COEF, cliprange_value=CLIP_RANGE)
    policy, critic, denominators = PolicyObjective(cfg), ValueObjective(cfg), Denominators(tokens, SEQUENCES - 1)

    def loss(micro: RolloutBatch, outputs: TokenOutputs) -> tuple[torch.Tensor, MetricSet]:
        columns = {name: torch.cat(values) for name, values in micro.columns.items()}
        common = {
            "mask": columns["loss_mask"],
            "response_lengths": micro.response_lengths,
            "denominators": denominators,
        }
        value, metrics = policy(
            outputs.log_probs, outputs.entropy, None, None, columns["advantages"], kl_coef=0.0, **common
        )
        of_critic, found = critic(outputs.values, columns["values"], columns["returns"], **common)
        metrics.merge(found)
        return value + VALUE_COEF * of_critic, metrics

    return loss


def train(rank: int, folder: str) -> dict[str, Any]:
    """Two steps, the second of which starts from a head that is not 0; what it starts from and its gradient."""
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.critic import ActorCriticEngine
    from mindspeed_rl.engine.megatron.engine import initialize_parallel_state

    cfg = MegatronConfig(lr=3e-2, adam_eps=1e-2, clip_grad=0.0)
    weights, batch = HFWeights(folder), batch_with_returns()
    initialize_parallel_state(cfg)
    model = ModelConfig.from_hf(weights.config())
    engine = ActorCriticEngine(cfg, model, device, 10, weights, with_reference=True)
    loss = loss_of(float(torch.cat(batch.columns["loss_mask"]).sum()))
    first = engine.score(batch, PASSES, TEMPERATURE)
    assert first is not None
    engine.train_mini_batch(batch, loss, PASSES, TEMPERATURE, entropy=True)
    parameters = dict(engine.actor[0].module.named_parameters())
    head = parameters[HEAD].detach().clone()
    exported = {name: tensor.clone() for name, tensor in engine.export_weights(1 << 20)}
    scored, reference = (engine.score(batch, PASSES, TEMPERATURE, reference) for reference in (False, True))
    metrics = engine.train_mini_batch(batch, loss, PASSES, TEMPERATURE, entropy=True)
    return {
        "first": first,
        "scored": scored,
        "reference": reference,
        "head": head,
        "exported": exported,
        "checksums": sorted(engine.weight_checksums()),
        "metrics": metrics.finalize(),
        "gradients": {name: parameter.main_grad.clone() for name, parameter in parameters.items()},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tied", tie=True))


@pytest.fixture(scope="module")
def trained(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(1, train, folder)[0]
    return found


def values_of(model: Any, head: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    """[R], of the hidden states before each response token."""
    values: Values = []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        hidden = model(torch.cat([prompt, response])[None], output_hidden_states=True).hidden_states[-1][0]
        values.append(hidden[len(prompt) - 1 : -1] @ head[0])
    return torch.cat(values)


def test_values_and_gradient_equal_autograd_in_float64(folder: str, trained: dict[str, Any]) -> None:
    batch = batch_with_returns()
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    model.load_state_dict({name: tensor.double() for name, tensor in trained["exported"].items()}, strict=False)
    head = trained["head"].double().requires_grad_()
    all_log_probs = hf_log_probs(model, batch, TEMPERATURE)
    log_probs, values = of_responses(all_log_probs, batch), values_of(model, head, batch)
    torch.testing.assert_close(trained["scored"].values.double(), values.detach(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(trained["scored"].log_probs.double(), log_probs.detach(), atol=2e-6, rtol=0)

    columns = {name: torch.cat(tensors).double() for name, tensors in batch.columns.items()}
    entropy = torch.cat([-(lp.exp() * lp).sum(-1) for lp in all_log_probs])
    policy = -columns["advantages"] * (log_probs - log_probs.detach()).exp() - ENTROPY_COEF * entropy
    near = columns["values"] + (values - columns["values"]).clamp(-CLIP_RANGE, CLIP_RANGE)
    critic = 0.5 * torch.maximum((values - columns["returns"]) ** 2, (near - columns["returns"]) ** 2)
    ((policy + VALUE_COEF * critic) * columns["loss_mask"]).sum().div(columns["loss_mask"].sum()).backward()
    assert 0 < trained["metrics"]["critic/vf_clipfrac"] < 1
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in parameter_table(ModelConfig.from_hf(HFWeights(folder).config())):
        expected = parameter.from_hf([gradients[name] for name in parameter.hf_names])
        torch.testing.assert_close(trained["gradients"][parameter.name].double(), expected, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(trained["gradients"][HEAD].double(), head.grad, atol=2e-6, rtol=1e-4)


def test_the_head_starts_from_0_and_belongs_to_training_alone(folder: str, trained: dict[str, Any]) -> None:
    assert not trained["first"].values.any()
    assert trained["head"].any()
    assert trained["reference"].values is None
    stored = sorted(HFWeights(folder).names)
    assert sorted(trained["exported"]) == trained["checksums"] == stored
