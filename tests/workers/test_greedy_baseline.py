"""Greedy responses on their way from rollout over rewards to advantages (ReMax), with real docks and verifiers."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.make_tiny_model import make_tokenizer
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.prompts import PromptSample
from mindspeed_rl.engine.base import Generation, GenerationRequest
from mindspeed_rl.transfer_dock.local import LocalTransferDock
from mindspeed_rl.transfer_dock.spec import Claim
from mindspeed_rl.workers.context import Context
from mindspeed_rl.workers.reward_worker import RewardWorker
from mindspeed_rl.workers.rollout import Rollout
from mindspeed_rl.workers.stages import dock_spec, selection

# two replicas have 6 rows each: the second group is cut
PROMPTS, GROUP, REPLICAS = 3, 4, 2
ROWS = PROMPTS * GROUP
FAILING_ROW, FAILING_BASELINE = 5, 2
VERIFIER = f"""
def value(prompt, response, label, **extra):
    number = float(response)
    if int(number) in ({FAILING_ROW}, {100 + FAILING_BASELINE}):
        raise RuntimeError("no score")
    return number
"""


class NumbersEngine:
    """Answers row r with the number r, and prompt p greedily with 100 + p; as text, each has a half more."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Generation]]:
        self.requests += requests
        for request in reversed(requests):  # a greedy response ends before its row, another group's first
            number = 100 + request.row // GROUP if request.greedy else request.row
            tokens = tokenizer(str(number))["input_ids"]
            log_probs = None if request.greedy else [0.0] * len(tokens)
            yield [Generation(request.row, tokens, log_probs, f"{number}.5", request.greedy)]


tokenizer: Any = make_tokenizer()


def configured(folder: Path, *overrides: str) -> Config:
    (folder / "rewards.py").write_text(VERIFIER)
    settings = [
        "rl_config.adv_estimator=remax",
        f"megatron_training.global_batch_size={PROMPTS}",
        f"rl_config.mini_batch_size={PROMPTS}",
        f"rl_config.n_samples_per_prompt={GROUP}",
        f"rl_config.actor_resource.num_npus={REPLICAS}",
        "rl_config.verifier_function=[custom]",
        f"rl_config.custom_reward_function.path={folder}/rewards.py",
        "rl_config.custom_reward_function.name=value",
        "rl_config.overlong_buffer_enable=true",  # the third token of a response costs 0.25
        "rl_config.overlong_buffer=2",
        "rl_config.overlong_buffer_penalty_factor=0.5",
        "generate_config.sampling_config.max_tokens=4",
        *overrides,
    ]
    return load_config("grpo_trainer_tiny_cpu", settings)[0]


def generated(config: Config) -> tuple[LocalTransferDock, list[NumbersEngine]]:
    """A dock with an iteration whose responses are there, and the replicas' engines."""
    layout = derive_layout(config)
    dock = LocalTransferDock(dock_spec(config, layout))
    dock.begin(0, PROMPTS, GROUP, ROWS, selection=selection(config))
    sample = PromptSample([1, 2], "1+1=", "2", "sums", {})
    dock.put(0, range(ROWS), {"prompt_ids": [torch.tensor([1, 2])] * ROWS, "sample": [sample] * ROWS})
    engines = [NumbersEngine() for _ in range(REPLICAS)]
    device = SimpleNamespace(manual_seed=lambda seed: None)
    for rank, engine in enumerate(engines):
        context = Context(rank, rank, config, layout, device, dock)  # type: ignore[arg-type]
        Rollout(context, engine).generate(0)  # type: ignore[arg-type]
    return dock, engines


@pytest.mark.parametrize(
    "overrides",
    [
        ["rl_config.blocking=true"],
        ["generate_config.sampling_config.detokenize=true", "rl_config.guarantee_order=false"],
        ["rl_config.filter_groups_enable=true", "generate_config.per_request_seed=false"],
    ],
    ids=["tokens", "texts without an order", "filtered"],
)
def test_samples_are_compared_with_their_greedy_response(
    overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tmp_path, *overrides)
    sampling, is_filtered = config.generate_config.sampling_config, config.rl_config.filter_groups_enable
    dock, engines = generated(config)
    asked = [[request.row for request in engine.requests if request.greedy] for engine in engines]
    assert sorted(asked[0] + asked[1]) == [0, GROUP, 2 * GROUP], "one for each group"
    if config.rl_config.guarantee_order:
        # by whom the group's first row belongs to; to filter, groups are dealt out whole
        assert asked == ([[0, 2 * GROUP], [GROUP]] if is_filtered else [[0, GROUP], [2 * GROUP]])
    peek = dock.try_claim("reward", 0, ROWS)
    assert isinstance(peek, Claim)
    carried = dock.get(peek, ["baseline_responses"])["baseline_responses"]
    assert [bool(len(tokens)) for tokens in carried] == [row % GROUP == 0 for row in peek.rows]
    dock.release(peek)

    worker = RewardWorker(config, derive_layout(config), tokenizer, dock, str(tmp_path))
    try:
        metrics = worker.score(0).metrics.finalize()
        if is_filtered:
            dock.fill(0)
        worker.compute_advantages(0, 0.0)
    finally:
        worker.close()
    half = 0.5 if sampling.detokenize else 0.0
    rewards = [row + half if row != FAILING_ROW else math.nan for row in range(ROWS)]
    baselines = [100 + p + half - 0.25 if p != FAILING_BASELINE else math.nan for p in range(PROMPTS)]
    assert metrics["reward/baseline_mean"] == sum(baselines[:2]) / 2
    assert metrics["reward/mean"] == pytest.approx(sum(r for r in rewards if r == r) / (ROWS - 1))
    assert metrics["custom_rewards/mean"] == metrics["reward/mean"], "of samples alone"
    assert metrics["reward_failed_baselines"] == metrics["reward_failed_samples"] == 1
    assert metrics["reward_status/ok"] == ROWS + PROMPTS - 2
    assert metrics["reward_status/error"] == 2
    assert metrics["response_length/total"] == ROWS + 2, "of what may be trained on"
    failures = [record.getMessage() for record in caplog.records if "custom failed" in record.getMessage()]
    rows = {int(message.split("such as row ")[1].split(":")[0]) for message in failures}
    assert rows <= {FAILING_ROW, FAILING_BASELINE * GROUP}
    assert rows
    if is_filtered:
        assert metrics["reward/filtered_groups"] == pytest.approx(1 / 3), "one that cannot train does not qualify"

    found = advantages(dock, config)
    assert found.keys() == set(range(ROWS))
    for row, (advantage, mask) in found.items():
        difference = rewards[row] - baselines[row // GROUP]
        trains = not math.isnan(difference)
        length = len(str(row))
        assert mask.tolist() == [float(trains)] * length
        assert advantage.tolist() == [difference if trains else 0.0] * length


def advantages(dock: LocalTransferDock, config: Config) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Advantages and loss mask of every row."""
    if config.rl_config.filter_groups_enable:  # whose surplus makes old log-probs a stage
        for share in range(REPLICAS):
            while (claim := dock.claim("old_log_prob", 0, ROWS, share)) is not None:
                dock.ack(claim, {"old_log_probs": [torch.zeros(len(str(row))) for row in claim.rows]})
    found = {}
    for share in range(REPLICAS):
        while (claim := dock.claim("update", 0, ROWS, share)) is not None:
            columns = dock.get(claim, ["advantages", "loss_mask"])
            pairs = zip(columns["advantages"], columns["loss_mask"], strict=True)
            found |= dict(zip(claim.rows, pairs, strict=True))
            dock.ack(claim)
    return found


def test_no_greedy_response_without_need(tmp_path: Path) -> None:
    _, engines = generated(configured(tmp_path, "rl_config.adv_estimator=rloo"))
    assert [request.row for engine in engines for request in engine.requests] == [*range(ROWS)]
    assert not any(request.greedy for engine in engines for request in engine.requests)
