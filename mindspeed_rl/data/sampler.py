"""The order in which prompts are used."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mindspeed_rl.common.errors import ConfigError, DataError, Violation
from mindspeed_rl.common.user_code import call_user, user_class
from mindspeed_rl.config.rule import nearest
from mindspeed_rl.config.schema import MegatronConfig


class Sampler(Protocol):
    """Which rows of a data set come next, without end."""

    def take(self, count: int) -> list[int]:
        """The next `count` indices."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of another one needs to go on with the same indices; picklable."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


def make_sampler(actor: MegatronConfig, sources: Sequence[str]) -> Sampler:
    """What the configuration asks for: `custom_sampler`, `data_source_weights`, or every row once an epoch.

    Args:
        actor: the configuration.
        sources: of each row, where it comes from.

    Raises:
        ConfigError: a weight is of a source that no row has, or the user's sampler cannot be made.
        DataError: there are no rows.
    """
    size, batch, shuffle = len(sources), actor.global_batch_size, not actor.no_shuffle
    if actor.custom_sampler is not None:
        return _CheckedSampler(actor, sources)
    if actor.data_source_weights is not None:
        return MixedSampler(sources, actor.data_source_weights, actor.order_seed, shuffle)
    return PromptSampler(size, batch, actor.order_seed, shuffle)


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
            if state.get(name) != getattr(self, name):
                raise DataError(
                    f"data position cannot be resumed: {name} was {state.get(name)!r} and is {getattr(self, name)!r}"
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


class MixedSampler:
    """Given shares of sources, each of whose rows are used like a data set of their own.

    The n-th index is of the source that lacks most of its share of n (of equal ones the first by name). With two
    sources each has had its share of n to less than a row; with more it may be off by little more. Sources without a
    weight are not used.

    Args:
        sources: of each row, where it comes from.
        weights: by source, above 0; shares are proportional to them.
        seed: of the order within each source.
        shuffle: whether there is one, or rows follow each other as they are.

    Raises:
        ConfigError: a weight is of a source that no row has.
    """

    def __init__(self, sources: Sequence[str], weights: Mapping[str, float], seed: int, shuffle: bool):
        key, known = "megatron_training.data_source_weights", sorted(set(sources))
        if unknown := sorted(set(weights) - set(known)):
            message = "no row is of this source"
            raise ConfigError(
                [Violation(f"{key}.{name}", weights[name], message, nearest(name, known)) for name in unknown]
            )
        total = sum(weights.values())
        self._rows = {name: [i for i, source in enumerate(sources) if source == name] for name in sorted(weights)}
        self._shares = {name: weights[name] / total for name in self._rows}
        self._samplers = {name: PromptSampler(len(rows), 1, seed, shuffle) for name, rows in self._rows.items()}
        self._taken = dict.fromkeys(self._rows, 0)

    def take(self, count: int) -> list[int]:
        """The next `count` indices."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        number = sum(self._taken.values()) + 1
        name = max(self._rows, key=lambda each: self._shares[each] * number - self._taken[each])
        self._taken[name] += 1
        return self._rows[name][self._samplers[name].take(1)[0]]

    def state_dict(self) -> dict[str, Any]:
        """Position of each source, and what must be the same for it to mean the same."""
        samplers = {name: sampler.state_dict() for name, sampler in self._samplers.items()}
        return {"shares": dict(self._shares), "taken": dict(self._taken), "samplers": samplers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position.

        Raises:
            DataError: weights, rows, seed or shuffling differ from those of the saved run.
        """
        if state.get("shares") != self._shares:
            message = f"data_source_weights gave {state.get('shares')} and give {self._shares}"
            raise DataError(f"data position cannot be resumed: {message}")
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(state["samplers"][name])
        self._taken = dict(state["taken"])


class _CheckedSampler:
    """The user's sampler, whose mistakes are told as such."""

    KEY = "megatron_training.custom_sampler"

    def __init__(self, actor: MegatronConfig, sources: Sequence[str]):
        assert actor.custom_sampler is not None, "asked for only where there is one"
        path, self.name, self.size = actor.custom_sampler.path, actor.custom_sampler.name, len(sources)
        self._sampler = self._call("()", user_class(path, self.name, self.KEY), list(sources), actor)

    def take(self, count: int) -> list[int]:
        indices = list(self._call(".take", self._sampler.take, count))
        if len(indices) != count or not all(isinstance(i, int) and 0 <= i < self.size for i in indices):
            message = f"must give {count} row numbers below {self.size}, gave {indices!r:.80}"
            raise DataError(f"custom_sampler: {self.name}.take({count}) {message}")
        return indices

    def state_dict(self) -> dict[str, Any]:
        return {"custom": copy.deepcopy(self._call(".state_dict", self._sampler.state_dict))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "custom" not in state:
            raise DataError("data position cannot be resumed: the saved run had no custom_sampler")
        self._call(".load_state_dict", self._sampler.load_state_dict, state["custom"])

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        return call_user(self.KEY, f"{self.name}{what}", function, *arguments)
