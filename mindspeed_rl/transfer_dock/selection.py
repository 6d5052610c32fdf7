"""Which groups an iteration trains on, out of more: with partial rollout, or a filter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.checks import integer
from mindspeed_rl.transfer_dock.spec import Filter, Selection


class Choice(ABC):
    """Groups that are complete, and groups that are selected: those that the stages behind work with.

    Args:
        prompts: groups to be selected.
        ages: [prompts of the iteration] iterations that each group has been part of before.
        keep_order: select in ascending order.
    """

    def __init__(self, prompts: int, ages: np.ndarray, keep_order: bool):
        self.prompts = integer("prompts of the selection", prompts)
        self.ages, self._keep_order = ages, keep_order
        self.complete = np.zeros(len(ages), bool)
        self.selected: list[int] = []

    @property
    def is_over(self) -> bool:
        """All groups are selected."""
        return len(self.selected) == self.prompts

    @property
    @abstractmethod
    def is_enough(self) -> bool:
        """Whoever generates may stop, and leave what is unfinished to the next iteration."""

    @property
    @abstractmethod
    def may_stay_unfinished(self) -> bool:
        """Rows can be done without all that is to be made of them."""

    @abstractmethod
    def is_last(self, prompts: np.ndarray) -> np.ndarray:
        """Whether each prompt's group is in its last iteration."""

    @abstractmethod
    def completed(self, prompts: list[int]) -> list[int]:
        """These groups are complete; returns the groups that are selected now, in order."""

    def incomplete(self, prompts: list[int]) -> None:
        """Values of these groups were lost; those that are selected stay so."""
        self.complete[list(set(prompts).difference(self.selected))] = False

    @abstractmethod
    def left(self) -> list[int]:
        """Groups for the next iteration, those that took part longest first."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Numbers of groups, by name."""

    def state(self) -> dict[str, Any]:
        """Plain values that `restore` takes."""
        return {"ages": self.ages.copy(), "complete": self.complete.copy(), "selected": list(self.selected)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.complete, self.selected = state["complete"].copy(), list(state["selected"])

    def _unselected(self) -> list[int]:
        return sorted(set(range(len(self.ages))) - set(self.selected))


class SelectionState(Choice):
    """Selects complete groups until there are `spec.prompts` (partial rollout).

    Without `keep_order` a group is selected when it is complete, so that the next stages can begin; places are kept
    for groups in their last iteration. With it all are selected at the end: those that took part longest, in
    ascending order.
    """

    may_stay_unfinished = True

    def __init__(self, spec: Selection, ages: np.ndarray, keep_order: bool):
        super().__init__(spec.prompts, ages, keep_order)
        self.spec = spec
        if not 1 <= spec.prompts <= len(ages):
            raise DockError(f"a selection of {spec.prompts} prompts: the iteration has {len(ages)}")
        integer("max_iterations", spec.max_iterations, least=1)
        self._last = ages + 1 >= spec.max_iterations
        self._count()
        if self._last.sum() > spec.prompts:
            raise DockError(
                f"{self._last.sum()} groups are in their last iteration of {spec.max_iterations}, "
                f"but only {spec.prompts} are selected: fewer prompts may be in generation at once"
            )

    @property
    def is_enough(self) -> bool:
        """Groups in their last iteration are complete, or end where they are."""
        if self.is_over:
            return True
        reached = self._number_complete if self._keep_order else len(self.selected)
        waiting = self._waiting
        return reached + waiting >= self.prompts and not (self.spec.finish_oldest and waiting)

    def _count(self) -> None:
        """Afresh; every claim looks at these numbers, so they are kept and not summed up each time."""
        self._number_complete = int(self.complete.sum())
        self._waiting = int((self._last & ~self.complete).sum())  # groups in their last iteration, not complete

    def is_last(self, prompts: np.ndarray) -> np.ndarray:
        return self._last[prompts]

    def completed(self, prompts: list[int]) -> list[int]:
        new: list[int] = []
        for prompt in prompts:
            if not self.complete[prompt]:
                self.complete[prompt] = True
                self._number_complete += 1
                self._waiting -= int(self._last[prompt])
            if not self._keep_order and not self.is_over and self._has_place(prompt):
                self.selected.append(prompt)
                new.append(prompt)
        if self._keep_order and not self.is_over and not self._waiting and self._number_complete >= self.prompts:
            oldest = sorted(np.flatnonzero(self.complete).tolist(), key=lambda prompt: (-self.ages[prompt], prompt))
            new = self.selected = sorted(oldest[: self.prompts])
        return new

    def _has_place(self, prompt: int) -> bool:
        return bool(self._last[prompt]) or len(self.selected) + self._waiting < self.prompts

    def left(self) -> list[int]:
        return sorted(self._unselected(), key=lambda prompt: -self.ages[prompt])

    def incomplete(self, prompts: list[int]) -> None:
        super().incomplete(prompts)
        self._count()

    @property
    def counts(self) -> dict[str, int]:
        return {"complete": self._number_complete, "selected": len(self.selected)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._count()


class FilterState(Choice):
    """Selects complete groups that nobody has rejected, until there are `spec.prompts`.

    Without `keep_order` a group is selected when it is complete. With it all are selected when every group of the
    iteration is complete: the first ones, so that which they are does not depend on how fast they were made.
    """

    may_stay_unfinished = False
    is_enough = False  # what is begun is completed: surplus groups are carried over whole

    def __init__(self, spec: Filter, ages: np.ndarray, keep_order: bool):
        super().__init__(integer("prompts of the filter", spec.prompts, least=1), ages, keep_order)
        self.rejected = np.zeros(len(ages), bool)

    def is_last(self, prompts: np.ndarray) -> np.ndarray:
        return np.zeros(len(prompts), bool)

    def judge(self, prompts: np.ndarray, rejected: np.ndarray) -> None:
        """Of these groups, the rejected ones are not to be selected when they are complete. The last word counts."""
        self.rejected[prompts] = False
        self.rejected[rejected] = True

    def completed(self, prompts: list[int]) -> list[int]:
        self.complete[prompts] = True
        candidates = [prompt for prompt in prompts if not self.rejected[prompt]]
        if self._keep_order and not self.is_over:
            candidates = np.flatnonzero(~self.rejected).tolist()
            if not self.complete.all() or len(candidates) < self.prompts:
                return []
        return self._take(candidates)

    def _take(self, candidates: list[int]) -> list[int]:
        new = candidates[: self.prompts - len(self.selected)]
        self.selected += new
        return new

    def extend(self, prompts: int) -> None:
        """So many groups join."""
        self.ages = np.pad(self.ages, (0, prompts))
        self.complete = np.pad(self.complete, (0, prompts))
        self.rejected = np.pad(self.rejected, (0, prompts))

    def fill(self) -> list[int]:
        """Select rejected groups for want of others; returns the groups that are selected now, in order.

        Raises:
            DockError: groups are incomplete, or all of them together too few.
        """
        if not self.complete.all() or len(self.complete) < self.prompts:
            complete = int(self.complete.sum())
            raise DockError(
                f"fill: {complete} of {len(self.complete)} groups are complete, and {self.prompts} are needed"
            )
        others = sorted(self._unselected(), key=lambda prompt: bool(self.rejected[prompt]))
        return self._take(sorted(others[: self.prompts - len(self.selected)]))

    def left(self) -> list[int]:
        """Rejected groups go no further."""
        return [prompt for prompt in self._unselected() if not (self.rejected[prompt] and self.complete[prompt])]

    @property
    def counts(self) -> dict[str, int]:
        return {
            "complete": int(self.complete.sum()),
            "rejected": int(self.rejected.sum()),
            "selected": len(self.selected),
            "filled": int(self.rejected[self.selected].sum()),
        }

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rejected": self.rejected.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.rejected = state["rejected"].copy()
