"""How much partial rollout shortens the rollout of an iteration, on responses with a long tail. Simulated engine.

The rollout role and the TransferDock are the real ones; the engine counts instead of computing: a decode step takes
the same time however few sequences run (decoding is bound by reading weights), and prefilling a token, also of a
response that goes on, takes a fraction of a step. `python benchmarks/partial_rollout.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from records import Record, publish

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.engine.base import Generation, GenerationRequest
from mindspeed_rl.transfer_dock.local import LocalTransferDock
from mindspeed_rl.transfer_dock.spec import Claim, Selection
from mindspeed_rl.workers.context import Context
from mindspeed_rl.workers.rollout import Rollout
from mindspeed_rl.workers.stages import dock_spec

PREFILL_STEPS_PER_TOKEN = 1 / 500
GROUP, PROMPTS, ITERATIONS, LONGEST = 8, 32, 20, 8192


@dataclass
class SimulatedEngine:
    """A `GenerationEngine` whose responses have given lengths; token t of response k is k x 10,000 + t.

    lengths: [prompts, samples]; a request's prompt is [number of the prompt], its sample is row modulo group.
    """

    lengths: np.ndarray
    steps: float = 0.0  # simulated time
    generated: np.ndarray = field(default_factory=lambda: np.empty(0, int))  # tokens of each response so far
    # row -> response, start, new tokens
    _running: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.generated):
            self.generated = np.zeros(self.lengths.size, int)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Generation]]:
        group = self.lengths.shape[1]
        for request in requests:
            response = int(request.prompt[0]) * group + request.row % group
            self.steps += (len(request.prompt) + len(request.generated)) * PREFILL_STEPS_PER_TOKEN
            self._running[request.row] = (response, len(request.generated), [])
        while self._running:
            self.steps += 1
            yield self._decode()

    def _decode(self) -> list[Generation]:
        finished = []
        for row, (response, start, tokens) in list(self._running.items()):
            position = start + len(tokens)
            assert position == self.generated[response], f"token {position} of response {response} again, or too soon"
            tokens.append(response * 10_000 + position)
            self.generated[response] += 1
            if position + 1 == self.lengths.flat[response]:
                finished.append(self._generation(row, tokens))
                del self._running[row]
        return finished

    def _generation(self, row: int, tokens: list[int]) -> Generation:
        return Generation(row, tokens, [-(token % 7) / 8 for token in tokens], None)

    def unfinished(self) -> dict[int, int]:
        return {row: len(tokens) for row, (_, _, tokens) in self._running.items()}

    def interrupt(self) -> list[Generation]:
        stopped = [self._generation(row, tokens) for row, (_, _, tokens) in self._running.items()]
        self._running.clear()
        return stopped

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def sleep(self) -> None: ...

    def wake_up(self, part: str) -> None: ...


def simulate(
    lengths: np.ndarray, iterations: int, batch: int, *overrides: str, replicas: int = 1
) -> tuple[SimulatedEngine, list[list[int]]]:
    """Run rollouts of `iterations` with `batch` prompts each; returns the engine, and for each iteration the
    prompts that were trained on, in order.

    Checks that what is trained on are whole responses, of which each token was generated once.
    """
    config, _ = load_config(
        "grpo_trainer_tiny_cpu",
        [
            f"megatron_training.global_batch_size={batch}",
            f"rl_config.mini_batch_size={batch}",
            f"rl_config.n_samples_per_prompt={lengths.shape[1]}",
            f"rl_config.actor_resource.num_npus={replicas}",
            "rl_config.epochs=2",  # so that old log-probs are a stage: its claims show what is trained on
            *overrides,
        ],
    )
    layout, rl = derive_layout(config), config.rl_config
    dock = LocalTransferDock(dock_spec(config, layout))
    first = SimulatedEngine(lengths)
    engines = [first, *(SimulatedEngine(lengths, generated=first.generated) for _ in range(1, replicas))]
    rollouts = [
        Rollout(Context(rank, rank, config, layout, CpuDevice(), dock), engine) for rank, engine in enumerate(engines)
    ]
    group, partial = lengths.shape[1], rl.partial_rollout_max_split > 1
    selection = Selection(batch, rl.partial_rollout_max_split, rl.require_max_age_all_finished) if partial else None
    used, carried, trained = 0, 0, []
    dock.begin(0, layout.prompts_in_generation, group, batch * group, None, selection)
    for iteration in range(iterations):
        fresh = layout.prompts_in_generation - carried
        prompts = [torch.tensor([used + n // group]) for n in range(fresh * group)]
        dock.put(iteration, range(carried * group, layout.rows_in_generation), {"prompt_ids": prompts})
        used += fresh
        dock.advance(iteration)
        for rollout in rollouts:
            rollout.version = iteration
        with ThreadPoolExecutor(replicas) as threads:
            list(threads.map(lambda rollout: rollout.generate(iteration), rollouts))  # noqa: B023 - run at once
        prompts = []
        for share in range(layout.dp):
            claim = dock.claim("old_log_prob", iteration, batch * group // layout.dp, share)
            assert claim is not None
            values = dock.get(claim, ("prompt_ids", "responses"))
            _check(values, claim, lengths)
            prompts += [int(prompt[0]) for prompt in values["prompt_ids"]]
        trained.append(prompts[::group])
        if partial:
            carried = dock.begin(
                iteration + 1, layout.prompts_in_generation, group, batch * group, None, selection, iteration
            )
        else:
            dock.begin(iteration + 1, layout.prompts_in_generation, group, batch * group)
        dock.clear(iteration)
    return first, trained


def _check(values: dict[str, list[torch.Tensor]], claim: Claim, lengths: np.ndarray) -> None:
    group = lengths.shape[1]
    for row, prompt, response in zip(claim.rows, values["prompt_ids"], values["responses"], strict=True):
        number = int(prompt[0]) * group + row % group
        expected = number * 10_000 + torch.arange(len(response))
        assert torch.equal(response, expected), f"row {row} of iteration {claim.iteration} is not one response"
        assert len(response) == lengths.flat[number] or any(claim.last), "an unfinished response was trained on"


def main() -> None:
    """Run and publish."""
    rng = np.random.default_rng(0)
    shape = (3 * ITERATIONS * PROMPTS, GROUP)
    lengths = np.clip(rng.lognormal(6.5, 0.9, shape).astype(int), 16, LONGEST)
    settings = {
        "whole responses": (),
        "2 iterations": ("rl_config.partial_rollout_max_split=2",),
        "2 iterations, cut": (
            "rl_config.partial_rollout_max_split=2",
            "rl_config.require_max_age_all_finished=false",
        ),
        "4 iterations": ("rl_config.partial_rollout_max_split=4",),
        "4 iterations, threshold 0.6": (
            "rl_config.partial_rollout_max_split=4",
            "rl_config.partial_rollout_threshold=0.6",
        ),
    }
    records, whole = [], 0.0
    for name, overrides in settings.items():
        engine, _ = simulate(lengths, ITERATIONS, PROMPTS, *overrides)
        whole = whole or engine.steps
        note = f"{name}: {PROMPTS} prompts x {GROUP}, lengths lognormal(6.5, 0.9) <= {LONGEST}"
        records += [
            Record("partial_rollout.steps", engine.steps / ITERATIONS, "decode steps/iteration", note=note),
            Record("partial_rollout.speedup", whole / engine.steps, "x", note=f"{name}, against whole responses"),
        ]
    publish("partial_rollout-simulated", records, "simulated")


if __name__ == "__main__":
    main()
