"""The rollout role of a rank: responses for the dock's prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl.transfer_dock.spec import Claim
from mindspeed_rl.workers.context import Context
from mindspeed_rl.workers.control import ControlGroup

if TYPE_CHECKING:
    from mindspeed_rl.engine.base import Generation, GenerationEngine


class Rollout:
    """Generates its rollout replica's share of every iteration. Its engine has no weights yet.

    Args:
        context: this rank's place in the run.
        hf_folder: the model's configuration in Hugging Face form.
        stop_tokens: ids that end a response.
    """

    def __init__(self, context: Context, hf_folder: str, stop_tokens: Sequence[int]):
        from mindspeed_rl.engine.vllm.engine import VllmEngine

        self.config, self.layout = context.config, context.layout
        self.device, self.dock, self.timeout = context.device, context.dock, context.stage_seconds
        self.replica = self.layout.rollout_replica(context.rank)
        self.group = ControlGroup(self.layout.rollout_engines(), context.rank, context.collective_minutes)
        self.sampling = self.config.generate_config.sampling_config
        self.version = 0  # of the weights in the engine: iterations that they were trained for
        seed = self.config.actor.seed + self.replica
        self.engine: GenerationEngine = VllmEngine(
            self.config.generate_config, hf_folder, self.device, seed, stop_tokens
        )

    def claim(self, iteration: int) -> list[Claim]:
        """Wait for prompts of the iteration; empty once all of this replica's share are answered."""
        return self.group.share(lambda: self._claim_prompts(iteration))

    def generate(self, iteration: int, claims: list[Claim] | None = None) -> None:
        """Generate this replica's share of the iteration's responses, of which it may hold `claims` already."""
        for _ in self.steps(iteration, claims):
            pass

    def steps(self, iteration: int, claims: list[Claim] | None = None) -> Iterator[bool]:
        """The same, a step of the engine at a time; finished groups go to the dock."""
        from mindspeed_rl.engine.base import GenerationRequest

        if not self.config.generate_config.per_request_seed:
            # the engine draws from the process's generator: from here on as a resumed run would
            self.device.manual_seed(self._seed(iteration, self.replica))
        if claims is None:
            claims = self.claim(iteration)
        while claims:
            requests = [
                GenerationRequest(row, prompt, self._request_seed(iteration, row))
                for claim in claims
                for row, prompt in zip(claim.rows, self.dock.get(claim, ("prompt_ids",))["prompt_ids"], strict=True)
            ]
            group_size = self.config.rl_config.n_samples_per_prompt
            claimed = Counter(request.row // group_size for request in requests)  # a share may end within a group
            finished: dict[int, list[Generation]] = {}
            for generations in self.engine.generate(requests):
                complete: list[Generation] = []
                for generation in generations:
                    group = generation.row // group_size
                    finished.setdefault(group, []).append(generation)
                    if len(finished[group]) == claimed[group]:
                        complete += finished.pop(group)
                if complete:
                    self._hand_in(complete, claims)
                yield True
            claims = self.claim(iteration)

    def _claim_prompts(self, iteration: int) -> list[Claim]:
        """All that is ready for this rollout replica: the engine must not run dry at a mini-batch's end."""
        rows = self.layout.sequences_per_iteration
        claims: list[Claim] = []
        claim: Any = self.dock.claim("rollout", iteration, rows, self.replica, self.timeout)
        while isinstance(claim, Claim):
            claims.append(claim)
            claim = self.dock.try_claim("rollout", iteration, rows, self.replica)
        return claims

    def _request_seed(self, iteration: int, row: int) -> int | None:
        """A seed for one sample, the same under every layout."""
        return self._seed(iteration, row) if self.config.generate_config.per_request_seed else None

    def _seed(self, iteration: int, number: int) -> int:
        # splitmix-like spreading keeps neighbouring (seed, iteration, number) far apart
        mixed = (self.config.actor.seed * 0x9E3779B97F4A7C15 + iteration * 0xBF58476D1CE4E5B9 + number) & (2**64 - 1)
        return ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) % 2**31

    def _hand_in(self, generations: Sequence[Generation], claims: Sequence[Claim]) -> None:
        """Results for the dock, which go with the rows' claims."""
        if not self.group.is_leader:
            return
        for claim in claims:
            rows = set(claim.rows)
            mine = [generation for generation in generations if generation.row in rows]
            if mine:
                self.dock.ack(claim, self._columns(mine), [generation.row for generation in mine])

    def _columns(self, generations: Sequence[Generation]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {
            "responses": [torch.tensor(g.tokens, dtype=torch.int64) for g in generations]
        }
        if self.sampling.logprobs:
            columns["rollout_log_probs"] = [torch.tensor(g.log_probs, dtype=torch.float32) for g in generations]
        if "policy_versions" in self.dock.spec.consumers["rollout"].puts:
            columns["policy_versions"] = [torch.full_like(tokens, self.version) for tokens in columns["responses"]]
        if self.sampling.detokenize:
            columns["texts"] = [g.text for g in generations]
        return columns
