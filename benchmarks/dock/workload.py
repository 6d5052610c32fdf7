"""The samples of a GRPO step that the benchmark moves: fixed lengths, and the product's own columns and consumers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mindspeed_rl.transfer_dock.spec import ConsumerSpec, DockSpec
from mindspeed_rl.workers.stages import COLUMNS

GROUP = 8  # samples a prompt
SEQUENCES = ("prompt_ids", "responses")
ALIKE = ("rollout_log_probs", "old_log_probs", "reference_log_probs", "advantages", "loss_mask")  # a float a token
# Named here, so that figures stay comparable when stages get further columns.
TENSOR_COLUMNS = {name: COLUMNS[name] for name in (*SEQUENCES, "rewards", *ALIKE)}

Columns = dict[str, Any]  # a list of 1-D tensors; for scalars one tensor [rows]


def grpo_spec(shares: int) -> DockSpec:
    """A dock for the stages of a GRPO step; `update` reads every column, as `shares` data-parallel ranks."""
    scoring = {"reference": "reference_log_probs", "old_log_prob": "old_log_probs"}
    return DockSpec(
        columns=TENSOR_COLUMNS,
        consumers={
            "rollout": ConsumerSpec(("prompt_ids",), puts=("responses", "rollout_log_probs")),
            "reward": ConsumerSpec(("responses",), puts=("rewards",)),
            **{stage: ConsumerSpec(SEQUENCES, shares, puts=(column,)) for stage, column in scoring.items()},
            "advantage": ConsumerSpec(("rewards", "responses"), grouped=True, puts=("advantages", "loss_mask")),
            "update": ConsumerSpec(tuple(TENSOR_COLUMNS), shares),
        },
    )


@dataclass(frozen=True)
class Workload:
    """`samples` sequences. Responses: lognormal(6.5, 0.9) tokens, cut to 16…8192; prompts: uniform in 64…1023.

    Bytes are those of the values with a prompt counted once for its group, as the dock and the packed array hold it;
    TransferQueue stores it for every sample (14 % more). Rates in bytes use the same number for all three.
    """

    samples: int

    @cached_property
    def response_lengths(self) -> np.ndarray:
        """[samples] int64."""
        return self._lengths[0]

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        """[samples / GROUP] int64."""
        return self._lengths[1]

    @cached_property
    def _lengths(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        responses = np.clip(rng.lognormal(6.5, 0.9, self.samples), 16, 8192).astype(np.int64)
        return responses, rng.integers(64, 1024, self.samples // GROUP)

    def rows(self, part: int, parts: int) -> range:
        """The contiguous rows of one of `parts` processes."""
        size = self.samples // parts
        return range(part * size, (part + 1) * size)

    def nbytes(self, rows: range) -> int:
        """Bytes of all columns of whole groups of rows."""
        per_token = sum(np.dtype(TENSOR_COLUMNS[name].dtype).itemsize for name in ("responses", *ALIKE))
        prompts = self.prompt_lengths[rows.start // GROUP : rows.stop // GROUP]
        lengths = self.response_lengths[rows.start : rows.stop]
        return int(8 * prompts.sum() + per_token * lengths.sum() + 4 * len(rows))

    @property
    def total_bytes(self) -> int:
        """Bytes of all columns of all samples."""
        return self.nbytes(range(self.samples))

    def columns(self, rows: range) -> Columns:
        """Values of whole groups of rows, every tensor in memory of its own, as stages produce them."""
        generator = torch.Generator().manual_seed(rows.start)
        prompts = self.prompt_lengths[rows.start // GROUP : rows.stop // GROUP].tolist()
        lengths = self.response_lengths[rows.start : rows.stop].tolist()
        ids = [torch.randint(0, 1000, (length,), generator=generator) for length in prompts]
        columns: Columns = {
            "prompt_ids": [prompt for prompt in ids for _ in range(GROUP)],
            "responses": [torch.randint(0, 1000, (length,), generator=generator) for length in lengths],
            "rewards": torch.randn(len(rows), generator=generator),
        }
        for name in ALIKE:
            columns[name] = [torch.randn(length, generator=generator) for length in lengths]
        return columns


def checksum(columns: Columns) -> int:
    """Sum of all token ids: proves that what was read is what was put, whoever read which rows."""
    return int(sum(values.sum() for name in SEQUENCES for values in columns[name]))
