"""The rollout role of a rank: responses for the dock's prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mindspeed_rl.config.generate import SamplingConfig
from mindspeed_rl.config.layout import tokens_may_be_stale, uses_greedy_baseline
from mindspeed_rl.config.schema import Config
from mindspeed_rl.engine.base import Generation, GenerationEngine, GenerationRequest
from mindspeed_rl.transfer_dock.spec import Claim
from mindspeed_rl.types import PartialResponse
from mindspeed_rl.workers.agent import AgentLoop, Conversation
from mindspeed_rl.workers.context import Context
from mindspeed_rl.workers.control import ControlGroup
from mindspeed_rl.workers.stages import uses_partial_rollout

# engine steps between two looks whether enough responses are complete (partial rollout)
STEPS_BETWEEN_LOOKS = 4
NOTHING = Generation(-1, [], None, None, greedy=True)  # greedy response of rows that carry none


def vllm_engine(context: Context, hf_folder: str, stop_tokens: Sequence[int]) -> GenerationEngine:
    """This rank's part of its replica's vLLM engine.

    Args:
        context: this rank's place in the run.
        hf_folder: the model's configuration in Hugging Face form.
        stop_tokens: ids that end a response.
    """
    from mindspeed_rl.engine.vllm.engine import VllmEngine

    config = context.config
    seed = config.actor.seed + context.layout.rollout_replica(context.rank)
    interruptible = uses_partial_rollout(config)
    return VllmEngine(config.generate_config, hf_folder, context.device, seed, stop_tokens, interruptible)


def validation_sampling(config: Config) -> SamplingConfig:
    """How tokens are drawn in validation."""
    validation, training = config.generate_config.val_sampling_config, config.generate_config.sampling_config
    return training.model_copy(
        update={
            "temperature": validation.temperature,
            "top_p": validation.top_p,
            "top_k": validation.top_k,
            "min_p": 0.0,
            "max_tokens": validation.max_tokens or training.max_tokens,
            "ignore_eos": False,
        }
    )


class Rollout:
    """Generates its rollout replica's share of every iteration. Its engine has no weights yet.

    Args:
        context: this rank's place in the run.
        engine: of its replica.
    """

    def __init__(self, context: Context, engine: GenerationEngine):
        self.config, self.layout = context.config, context.layout
        self.device, self.dock, self.timeout = context.device, context.dock, context.stage_seconds
        self.replica = self.layout.rollout_replica(context.rank)
        self.group = ControlGroup(self.layout.rollout_engines(), context.rank, context.collective_minutes)
        self.sampling = self.config.generate_config.sampling_config
        self.is_partial = uses_partial_rollout(self.config)
        self.engine = engine
        self.agent = AgentLoop(self.config, engine, self.group) if self.config.tools_config.enabled else None
        self.version = 0  # of the engine's weights: iterations that they were trained on

    def claim(self, iteration: int) -> list[Claim]:
        """Wait for prompts of the iteration; empty once nothing of this replica's share is left to do."""
        return self.group.share(lambda: self._claim_prompts(iteration))

    def generate(self, iteration: int, claims: list[Claim] | None = None, wave: int = 0) -> None:
        """Generate this replica's share of the iteration's responses, of which it may hold `claims` already.

        wave: number of the iteration's prompts that were put together, counted from 0 (see `TransferDock.extend`).
        """
        for _ in self.steps(iteration, claims, wave):
            pass

    def steps(self, iteration: int, claims: list[Claim] | None = None, wave: int = 0) -> Iterator[bool]:
        """The same, a step of the engine at a time; finished groups go to the dock."""
        if not self.config.generate_config.per_request_seed:
            # the engine draws from the process's generator: from here on as a resumed run would
            self.device.manual_seed(self._seed(iteration, self.replica + wave * self.layout.rollout_replicas))
        if claims is None:
            claims = self.claim(iteration)
        while claims:
            yield from _Round(self, claims).steps()
            claims = self.claim(iteration)

    def _claim_prompts(self, iteration: int) -> list[Claim]:
        """All that is ready for this rollout replica: the engine must not run dry at a mini-batch's end."""
        rows = self.layout.rows_in_generation
        claims: list[Claim] = []
        claim: Any = self.dock.claim("rollout", iteration, rows, self.replica, self.timeout)
        while isinstance(claim, Claim):
            claims.append(claim)
            claim = self.dock.try_claim("rollout", iteration, rows, self.replica)
        return claims

    def validate(self, iteration: int, prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Answer this replica's share of `prompts`, every so many-th of them, as `val_sampling_config` says.

        Returns:
            For each prompt of the share its responses' ids; nothing but on the replica's leader.
        """
        count, sampling = self.config.generate_config.val_sampling_config.n, validation_sampling(self.config)
        share = range(self.replica, len(prompts), self.layout.rollout_replicas)
        requests = [
            GenerationRequest(
                row=prompt * count + number,
                prompt=torch.tensor(prompts[prompt]),
                seed=self._seed(-1 - iteration, prompt * count + number),  # apart from those of training
                sampling=sampling,
            )
            for prompt in share
            for number in range(count)
        ]
        found = {each.row: each.tokens for done in self.engine.generate(requests) for each in done}
        if not self.group.is_leader:
            return []
        return [[found[prompt * count + number] for number in range(count)] for prompt in share]

    def request_seed(self, iteration: int, row: int) -> int | None:
        """A seed for one sample, the same under every layout."""
        return self._seed(iteration, row) if self.config.generate_config.per_request_seed else None

    def _seed(self, iteration: int, number: int) -> int:
        # splitmix-like spreading keeps neighbouring (seed, iteration, number) far apart
        mixed = (self.config.actor.seed * 0x9E3779B97F4A7C15 + iteration * 0xBF58476D1CE4E5B9 + number) & (2**64 - 1)
        return ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) % 2**31


class _Round:
    """The rows of some claims on their way through the engine."""

    def __init__(self, rollout: Rollout, claims: Sequence[Claim]):
        self.rollout, self.iteration = rollout, claims[0].iteration
        self.claim_of = {row: claim for claim in claims for row in claim.rows}
        self.begun: dict[int, PartialResponse] = {}  # what rows had before
        self.must_end: set[int] = set()  # rows that end where they are when the iteration does
        self.requests: list[GenerationRequest] = []
        self.group_size = rollout.config.rl_config.n_samples_per_prompt
        has_baseline = uses_greedy_baseline(rollout.config)
        for claim in claims:
            columns = rollout.dock.get(claim, rollout.dock.spec.consumers["rollout"].reads)
            partial = columns.get("partial") or [None] * len(claim)
            for row, prompt, response in zip(claim.rows, columns["prompt_ids"], partial, strict=True):
                self.begun[row] = response or PartialResponse.empty()
                seed = rollout.request_seed(self.iteration, row)
                self.requests.append(GenerationRequest(row, prompt, seed, self.begun[row].tokens.tolist()))
                if has_baseline and row % self.group_size == 0:  # also where the group's others are another share's
                    self.requests.append(GenerationRequest(row, prompt, seed=None, greedy=True))
            if not rollout.config.rl_config.require_max_age_all_finished:
                self.must_end |= {row for row, last in zip(claim.rows, claim.last, strict=False) if last}
        # a share may end within a group, and rows of a group that were finished before do not come again
        self.claimed = Counter(request.row // self.group_size for request in self.requests)
        self.finished: dict[int, list[Generation]] = {}
        self.greedy: dict[int, Generation] = {}  # finished ones, by the row that they are handed in with

    def steps(self) -> Iterator[bool]:
        """Run the engine until all rows are finished, or the iteration has enough."""
        source = self.rollout.agent or self.rollout.engine
        steps: Iterator[Sequence[Generation]] = source.generate(self.requests)
        for number, generations in enumerate(steps):
            self._finish(generations)
            yield True
            look = self.rollout.is_partial and number % STEPS_BETWEEN_LOOKS == STEPS_BETWEEN_LOOKS - 1
            if look and self.rollout.group.share(self._is_enough):
                self._stop(self.rollout.engine.interrupt())
                return

    def _finish(self, generations: Sequence[Generation]) -> None:
        complete: list[Generation] = []
        for generation in generations:
            group = generation.row // self.group_size
            if generation.greedy:
                self.greedy[generation.row] = generation
            self.finished.setdefault(group, []).append(generation)
            if len(self.finished[group]) == self.claimed[group]:
                complete += self.finished.pop(group)
        self._hand_in([generation for generation in complete if not generation.greedy], self._response_columns)

    def _is_enough(self) -> bool:
        """The iteration needs nothing more of this replica, and no row has to end without a token."""
        rollout = self.rollout
        rows = rollout.layout.rows_in_generation
        more = rollout.dock.try_claim("rollout", self.iteration, rows, rollout.replica)
        if isinstance(more, Claim):  # rows that came back: they are for the next round
            rollout.dock.release(more)
        if more is not None:
            return False
        new = rollout.engine.unfinished()
        return all(count or len(self.begun[row].tokens) for row, count in new.items() if row in self.must_end)

    def _stop(self, generations: Sequence[Generation]) -> None:
        """Keep what there is of unfinished responses for the next iteration, which goes on with it."""
        waiting = [generation for group in self.finished.values() for generation in group]
        ended = [generation for generation in generations if generation.row in self.must_end]
        self._hand_in([*waiting, *ended], self._response_columns)
        self._hand_in(
            [generation for generation in generations if generation.row not in self.must_end],
            lambda kept: {"partial": [self._extended(generation) for generation in kept]},
        )

    def _hand_in(
        self, generations: Sequence[Generation], columns: Callable[[list[Generation]], dict[str, list[Any]]]
    ) -> None:
        if not self.rollout.group.is_leader:
            return
        by_claim: dict[int, list[Generation]] = {}
        for generation in generations:
            by_claim.setdefault(self.claim_of[generation.row].lease, []).append(generation)
        for members in by_claim.values():
            rows = [generation.row for generation in members]
            self.rollout.dock.ack(self.claim_of[rows[0]], columns(members), rows)

    def _extended(self, generation: Generation) -> PartialResponse:
        return self.begun[generation.row].extended(generation.tokens, generation.log_probs, self.rollout.version)

    def _response_columns(self, generations: list[Generation]) -> dict[str, list[Any]]:
        responses = [self._extended(generation) for generation in generations]
        columns: dict[str, list[Any]] = {"responses": [response.tokens for response in responses]}
        if self.rollout.sampling.logprobs:
            columns["rollout_log_probs"] = [response.log_probs for response in responses]
        if tokens_may_be_stale(self.rollout.config):
            columns["policy_versions"] = [response.versions for response in responses]
        if self.rollout.sampling.detokenize:
            columns["texts"] = [generation.text for generation in generations]
        if self.rollout.agent:
            conversations = [each for each in generations if isinstance(each, Conversation)]
            columns["response_mask"] = [torch.tensor(each.mask) for each in conversations]
            columns["tool_use"] = [each.tool_use for each in conversations]
        if uses_greedy_baseline(self.rollout.config):
            greedy = [self.greedy.get(generation.row, NOTHING) for generation in generations]
            columns["baseline_responses"] = [torch.tensor(each.tokens, dtype=torch.int64) for each in greedy]
            if self.rollout.sampling.detokenize:
                columns["baseline_texts"] = [each.text for each in greedy]
        return columns
