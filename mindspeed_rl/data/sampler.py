"""The order in which prompts are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DataError


class PromptSampler:
    """Endless batches of prompt indices; every epoch uses each prompt once, reshuffled.

    The order of an epoch depends on (seed, epoch) alone, so that the number of prompts used so far is all the state.
    A batch that reaches the end of an epoch goes on with the next one; only there can it name a prompt twice.

    Raises:
        DataError: size or batch is less than 1.
    """

    def __init__(self, size: int, batch: int, seed: int, shuffle: bool = True):
        for name, value in {"size": size, "batch": batch}.items():
            if value < 1:
                raise DataError(f"{name} = {value}: must be at least 1")
        self.size, self.batch, self.seed, self.shuffle = size, batch, seed, shuffle
        self._used = 0
        self._order_epoch = -1
        self._order: list[int] = []

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._used // self.size

    @property
    def position(self) -> float:
        """Epochs so far."""
        return self._used / self.size

    def __iter__(self) -> PromptSampler:
        return self

    def __next__(self) -> list[int]:
        """[batch] indices below `size`."""
        return self.take(self.batch)

    def take(self, count: int) -> list[int]:
        """The next `count` indices."""
        indices: list[int] = []
        while len(indices) < count:
            order = self._epoch_order(self.epoch)
            offset = self._used % self.size
            piece = order[offset : offset + count - len(indices)]
            indices += piece
            self._used += len(piece)
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Position, and what must be the same for it to mean the same."""
        return {"used": self._used, "size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; the batch size may differ.

        Raises:
            DataError: the data set's size, the seed or the shuffling differ from those of the saved run.
        """
        for name in ("size", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"data position cannot be resumed: {name} was {state[name]!r} and is {getattr(self, name)!r}"
                )
        self._used = state["used"]

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._order_epoch:
            order = permutation(self.size, self.seed, epoch) if self.shuffle else list(range(self.size))
            self._order, self._order_epoch = order, epoch
        return self._order


def permutation(size: int, seed: int, number: int) -> list[int]:
    """The numbers below `size` in an order that depends on (size, seed, number) alone."""
    # RandomState, whose stream NumPy keeps stable for ever: a resumed run may meet a newer NumPy
    bits = np.random.MT19937(np.random.SeedSequence([seed, number]))
    return np.random.RandomState(bits).permutation(size).tolist()
