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
class Denominators:
    """Sizes of the global mini-batch (all data-parallel ranks), fixed before the first backward pass."""

    tokens: float  # response tokens that count (mask 1)
    sequences: float  # sequences with at least one counted token
