"""Data types that cross package borders.

Dimension legend, used in every shape in this project:
`B` sequences, `G` samples a prompt (the group), `T` tokens packed (prompt and response, end to end),
`R` response tokens packed, `L` padded length, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class RolloutBatch:
    """Sequences of one claim, each a prompt and its response; lists have length `B`."""

    prompts: list[torch.Tensor]  # B x [prompt length], int64
    responses: list[torch.Tensor]  # B x [response length], int64
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # name -> B x [response length], float32

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, indices: Sequence[int]) -> RolloutBatch:
        """The sequences at `indices`, in that order; tensors are shared, not copied."""
        return RolloutBatch(
            [self.prompts[index] for index in indices],
            [self.responses[index] for index in indices],
            {name: [values[index] for index in indices] for name, values in self.columns.items()},
        )

    @property
    def lengths(self) -> list[int]:
        """[B] tokens of each sequence, prompt and response."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def response_lengths(self) -> torch.Tensor:
        """[B], int64."""
        return torch.tensor([len(response) for response in self.responses], dtype=torch.int64)


@dataclass(frozen=True)
class PartialResponse:
    """A response as far as it is generated; tensors have its length."""

    tokens: torch.Tensor  # int64
    log_probs: torch.Tensor  # float32, under the policy that generated each token; NaN where that was not asked for
    versions: torch.Tensor  # int64, of that policy: iterations that it was trained on

    @classmethod
    def empty(cls) -> PartialResponse:
        """Nothing yet."""
        integers = torch.empty(0, dtype=torch.int64)
        return cls(integers, torch.empty(0, dtype=torch.float32), integers)

    def extended(self, tokens: Sequence[int], log_probs: Sequence[float] | None, version: int) -> PartialResponse:
        """With tokens that a policy of `version` has added."""
        added = [float("nan")] * len(tokens) if log_probs is None else log_probs
        return PartialResponse(
            torch.cat((self.tokens, torch.tensor(tokens, dtype=torch.int64))),
            torch.cat((self.log_probs, torch.tensor(added, dtype=torch.float32))),
            torch.cat((self.versions, torch.full((len(tokens),), version, dtype=torch.int64))),
        )


@dataclass(frozen=True)
class ToolUse:
    """What a response has done with tools."""

    turns: int = 0  # that the model has generated
    calls: int = 0  # that were answered
    failed: int = 0  # of those: malformed, unknown, or the tool said that it could not
    timed_out: int = 0  # of those
    tokens: int = 0  # of the response that are from tools


@dataclass(frozen=True)
class Denominators:
    """Sizes of the global mini-batch (all data-parallel ranks), fixed before the first backward pass."""

    tokens: float  # response tokens that count (mask 1)
    sequences: float  # sequences with at least one counted token
