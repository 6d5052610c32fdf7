"""SFT and DPO on real engines: losses, gradients and steps against transformers in float64, in every layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch.nn.functional import logsigmoid

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.common.timing import Timings
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.data.packing import balanced_partition
from mindspeed_rl.data.supervised import Response, SupervisedRow

STEPS, ROWS = 2, 8
LR = 1e-3


def make_rows(responses: int) -> list[SupervisedRow]:
    """Of different lengths, some tokens not learned; without token 0, to which transformers gives no gradient."""
    rng = np.random.default_rng(1)

    def response() -> Response:
        ids = rng.integers(1, 16, rng.integers(2, 9)).astype(np.int32)
        learned = rng.random(len(ids)) < 0.7
        learned[-1] = True
        return Response(ids, learned)

    def row() -> SupervisedRow:
        prompt = rng.integers(1, 16, rng.integers(1, 6)).astype(np.int32)
        return SupervisedRow("here", "a", prompt, tuple(response() for _ in range(responses)))

    return [row() for _ in range(ROWS)]


def train(rank: int, folder: str, stage: str, overrides: list[str]) -> dict[str, Any]:
    """Metrics of some steps on the same rows, and of a validation after them, one row too few for every rank."""
    from mindspeed_rl.config.model import ModelConfig
    from mindspeed_rl.device.select import make_device

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.workers.context import Context, Source
    from mindspeed_rl.workers.supervised import Supervised

    settings = [f"actor_config.load={folder}", f"actor_config.lr={LR}", "actor_config.lr_decay_style=constant"]
    settings += ["actor_config.lr_warmup_fraction=0", f"megatron_training.global_batch_size={ROWS}"]
    config, _ = load_config(f"{stage}_tiny_cpu", [*settings, *overrides], files_exist=False)
    layout = derive_layout(config)
    model = ModelConfig.from_hf(json.loads(Path(folder, "config.json").read_text()))
    context = Context(rank, rank, config, layout, device, None)
    role = Supervised(context, model, Source(hf_folder=folder, weights=folder))
    rows = make_rows(role.objective.responses)
    shares = balanced_partition([float(sum(row.lengths)) for row in rows], layout.dp)
    found = [role.update(rows, shares, Timings(step)) for step in range(STEPS)]
    few = [*rows[:3], rows[0].unlearned()]
    validated = role.validate(few, balanced_partition([1.0] * 4, layout.dp), Timings(STEPS))
    return {"steps": found, "validated": validated}


def run(world: int, folder: Path, stage: str, *overrides: str) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Metrics of all ranks together, as the driver puts them together."""
    of_ranks = run_ranks(world, train, str(folder), stage, [f"rl_config.actor_resource.num_npus={world}", *overrides])
    merged = of_ranks[0]
    for other in of_ranks[1:]:
        for mine, theirs in zip(merged["steps"], other["steps"], strict=True):
            mine.merge(theirs)
        merged["validated"].merge(other["validated"])
    return [step.finalize() for step in merged["steps"]], merged["validated"].finalize()


def reference(folder: Path, stage: str, loss_type: str = "sigmoid") -> list[dict[str, float]]:
    """The same by transformers and torch, in float64, row by row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    frozen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    rows = make_rows(2 if stage == "dpo" else 1)
    # weights alone decay in Megatron, biases and norms do not; here none does
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def sums(of: torch.nn.Module, row: SupervisedRow) -> list[torch.Tensor]:
        found = []
        for response in row.responses:
            ids = torch.tensor([*row.prompt, *response.ids], dtype=torch.int64)
            log_probs = of(ids[None]).logits[0].log_softmax(-1)[len(row.prompt) - 1 : -1]
            picked = log_probs.gather(1, ids[len(row.prompt) :, None])[:, 0]
            found.append((picked * torch.tensor(response.learned)).sum())
        return found

    metrics = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if stage == "sft":
            tokens = sum(int(response.learned.sum()) for row in rows for response in row.responses)
            loss = -torch.stack([total for row in rows for total in sums(model, row)]).sum() / tokens
            metrics.append(
                {"sft/loss": loss.item(), "sft/perplexity": loss.exp().item(), "sft/tokens": float(tokens)}
            )
        else:
            losses, margins = [], []
            for row in rows:
                chosen, rejected = sums(model, row)
                with torch.no_grad():
                    of_chosen, of_rejected = sums(frozen, row)
                h = (chosen - of_chosen) - (rejected - of_rejected)
                of_pair = {"sigmoid": -logsigmoid(0.1 * h), "ipo": (h - 5.0) ** 2, "hinge": torch.relu(1 - 0.1 * h)}
                losses.append(of_pair[loss_type])
                margins.append(0.1 * h.item())
            loss = torch.stack(losses).mean()
            metrics.append({"dpo/loss": loss.item(), "dpo/margin": float(np.mean(margins))})
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        metrics[-1]["actor/grad_norm"] = norm.item()
        optimizer.step()
    return metrics


TP, PP = "actor_config.tensor_model_parallel_size", "actor_config.pipeline_model_parallel_size"
LAYOUTS = {
    "one": (1, []),
    "DP2-of-pairs": (2, ["actor_config.micro_batch_size=2"]),
    "TP2-sequence-parallel": (2, [f"{TP}=2", "actor_config.sequence_parallel=true"]),
    "PP2-by-tokens": (
        2,
        [
            f"{PP}=2",
            "~actor_config.micro_batch_size",
            "rl_config.use_dynamic_bsz=true",
            "rl_config.max_packing_token_size=32",
        ],
    ),
    "CP2": (2, ["actor_config.context_parallel_size=2"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, float]]]:
    return {stage: reference(folder, stage) for stage in ("sft", "dpo")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_every_layout_takes_the_steps_of_the_reference(
    folder: Path, expected: dict[str, list[dict[str, float]]], stage: str, layout: str
) -> None:
    world, overrides = LAYOUTS[layout]
    steps, validated = run(world, folder, stage, *overrides)
    for step, wanted in zip(steps, expected[stage], strict=True):
        for name, value in wanted.items():
            assert step[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
    # rows that only fill up do not count: three do
    assert validated[f"{stage}/loss"] < steps[0][f"{stage}/loss"]
    if stage == "sft":
        rows = make_rows(1)[:3]
        assert validated["sft/tokens"] == sum(int(row.responses[0].learned.sum()) for row in rows)


@pytest.mark.parametrize("loss_type", ["ipo", "hinge"])
def test_other_losses_of_a_pair(folder: Path, loss_type: str) -> None:
    steps, _ = run(1, folder, "dpo", f"dpo_config.loss_type={loss_type}")
    for step, wanted in zip(steps, reference(folder, "dpo", loss_type), strict=True):
        for name, value in wanted.items():
            assert step[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
