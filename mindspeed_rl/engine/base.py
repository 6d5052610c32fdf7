"""What the integrated worker expects of a training engine and of a generation engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mindspeed_rl.checkpoint.tensors import Piece, StoredTensors
from mindspeed_rl.common.metric import MetricSet
from mindspeed_rl.config.generate import SamplingConfig
from mindspeed_rl.resharding.layout import RolloutLayout
from mindspeed_rl.types import RolloutBatch


@dataclass(frozen=True)
class TokenOutputs:
    """What a pass says of the R response tokens of its sequences; None: it was not asked for.

    In training all carry a gradient.
    """

    log_probs: torch.Tensor | None = None  # [R] float32, of the tokens themselves; None from a critic
    entropy: torch.Tensor | None = None  # [R] float32, of the distributions they are drawn from
    kl: torch.Tensor | None = None  # [R] float32, of those to the reference's, over the whole vocabulary
    values: torch.Tensor | None = None  # [R] float32, of what is before each token; from a critic


LossFunction = Callable[[RolloutBatch, TokenOutputs], tuple[torch.Tensor, MetricSet]]  # scalar, metrics
# the sequences of each forward(-backward) pass, as indices into a batch: every index once, no pass without any
Partition = Sequence[Sequence[int]]


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate."""

    row: int  # the sample's row in the TransferDock
    prompt: torch.Tensor  # [prompt length], int64
    seed: int | None  # of this request's own generator; None: the engine's generator
    generated: Sequence[int] = ()  # tokens of the response that exist already; generation goes on after them
    greedy: bool = False  # always the likeliest token: a response beside the row's own, without log-probs
    sampling: SamplingConfig | None = None  # None: the engine's; otherwise without log-probs
    turn: int = 0  # of a response of several turns, which has a request for each; the prompt holds earlier ones
    max_tokens: int | None = None  # most tokens to generate; None: what `generated` leaves of the sampling's


@dataclass(frozen=True)
class Generation:
    """What was generated for one request: a response, or from `generated` of the request on, what follows."""

    row: int
    tokens: list[int]  # the end-of-sequence token included, if there was one
    log_probs: list[float] | None  # of each token, under the distribution it was drawn from
    text: str | None  # only if the engine was asked to turn tokens into text
    greedy: bool = False  # as in the request


class TrainingEngine(Protocol):
    """Actor and reference on this rank's shard of the training layout."""

    is_output_rank: bool  # one rank of each model replica: log-probs and metrics come from it
    data_parallel_rank: int

    def score(
        self, batch: RolloutBatch, micro_batches: Partition, temperature: float, reference: bool = False
    ) -> TokenOutputs | None:
        """Log-probs, or a critic's values, of the response tokens, [R] on the host; None off the output rank.

        They are in the order of `batch`, whatever the micro-batches.
        """

    def train_mini_batch(
        self,
        batch: RolloutBatch,
        loss_function: LossFunction,
        micro_batches: Partition,
        temperature: float,
        entropy: bool,
        kl: bool = False,
        limit: tuple[str, float] | None = None,
    ) -> MetricSet:
        """One optimizer step on this data-parallel rank's share of a mini-batch.

        entropy, kl: the loss function gets these, too (see `TokenOutputs`); kl needs the reference on the device.
        limit: a metric that is a mean over the mini-batch, and the largest value with which the step is taken;
        `actor/early_stopped` tells every rank whether it was not.
        """

    def sum_over_data_parallel(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over the data-parallel ranks."""

    def max_over_data_parallel(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over the data-parallel ranks."""

    def gather_over_data_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """[n] float32 of every data-parallel rank, [ranks, n] on the host."""

    def export_weights(
        self, bucket_bytes: int, rollout: RolloutLayout | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that this rank takes part in rollout with, under their Hugging Face names (a collective).

        Args:
            bucket_bytes: memory of one bucket, of which two are in use.
            rollout: what each rank takes; None: all weights.
        """

    def weight_checksums(self) -> dict[str, int]:
        """Of all Hugging Face tensors, computed on the shards (a collective; see `resharding.checksums`)."""

    def offload(self, part: str) -> None:
        """Move "param", "grad" (dropped), "optimizer" or "reference" off the device; a no-op if it is away."""

    def onload(self, part: str) -> None:
        """Bring such a part back; a no-op if it is not away."""

    def pieces(self, optimizer: bool) -> list[Piece]:
        """This rank's share of weights and, if asked for, optimizer state; memory in use, not copies."""

    def rank_state(self, optimizer: bool, rng: bool) -> dict[str, Any]:
        """Small state beside the pieces, as tensors and plain Python values."""

    def load_state(self, tensors: StoredTensors, state: Mapping[str, Any], optimizer: bool) -> None:
        """Restore what ranks of this or any other layout wrote of `pieces`, and `rank_state` of one of them.

        Raises:
            CheckpointError: it is of another model, or the optimizer's part was asked for and is not there.
        """

    def load_rng(self, state: Mapping[str, Any], iteration: int) -> None:
        """Restore the generators' state, or if there is none because it was of another layout, seed them anew."""


class RewardEngine(Protocol):
    """A reward model on this rank's shard of the training layout. It is never trained."""

    def rewards(self, sequences: Sequence[torch.Tensor], micro_batches: Partition) -> torch.Tensor | None:
        """Of sequences, B x [length] int64, what is in the value of each one's last token.

        Returns:
            [B] float32 on the host, in their order; None off the output rank.
        """

    def offload(self) -> None:
        """Move the weights off the device; a no-op if they are away."""

    def onload(self) -> None:
        """Bring them back; a no-op if they are not away."""


class GenerationEngine(Protocol):
    """Rollout on this rank's shard of the generation layout."""

    stop_tokens: list[int]  # ids that end a response
    asleep_bytes: int  # of device memory that is given back while the engine sleeps; 0 while all of it is awake

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Generation]]:
        """Yield after every engine step, with the responses that it finished (possibly none)."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Have these generated, too, while `generate` is under way."""

    def unfinished(self) -> dict[int, int]:
        """Rows in generation, and how many tokens each has got so far (those of earlier requests left out).

        Greedy responses are not among them.
        """

    def interrupt(self) -> list[Generation]:
        """Stop generating: what there is of all unfinished responses, possibly no token."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, given under their Hugging Face names."""

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """What of this rank's engine has not the bits that a new engine has after loading `weights`: names."""

    def sleep(self) -> None:
        """Give device memory (weights, KV cache) back."""

    def wake_up(self, part: str) -> None:
        """Take memory for `part`: "weights" or "kv_cache"."""
