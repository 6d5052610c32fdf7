"""`validate_weight`: proof, after each update of rollout's weights, that they are those of training, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from mindspeed_rl.common.errors import WeightMismatch
from mindspeed_rl.engine.base import GenerationEngine
from mindspeed_rl.resharding.checksums import differing, with_checksums

SHOWN = 20  # names in a message
Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def update_and_validate(
    engine: GenerationEngine, weights: Weights, expected: Mapping[str, int], version: int, rank: int
) -> None:
    """Give `weights` to the engine and check that they have arrived, and that they are what it computes with.

    Args:
        engine: on this rank.
        weights: yields them, as often as it is called (a collective if it is one).
        expected: checksums of the training ranks' shards, of those tensors that this rank takes.
        version: iterations that they were trained for.
        rank: this one.

    Raises:
        WeightMismatch: tensors have arrived with other bits, or are not what the engine computes with; names them.
    """
    arrived: dict[str, torch.Tensor] = {}
    engine.update_weights(with_checksums(weights(), arrived))
    changed = differing(expected, arrived)
    stale = engine.differing_weights(weights())
    problems = [
        f"{len(names)} {what}: {_listed(names)}"
        for names, what in (
            (changed, "tensors did not arrive as the training ranks hold them"),
            (stale, "weights in vLLM differ from those of a fresh load of the same tensors"),
        )
        if names
    ]
    if problems:
        raise WeightMismatch(f"validate_weight, rank {rank}, weights of iteration {version}: {'; '.join(problems)}")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
