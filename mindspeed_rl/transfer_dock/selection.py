"""Which groups an iteration trains on when it ends before all of its prompts are complete (partial rollout)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_rl.common.errors import DockError
from mindspeed_rl.transfer_dock.checks import integer
from mindspeed_rl.transfer_dock.spec import Selection


class SelectionState:
    """Selects complete groups until there are `spec.prompts`.

    Without `keep_order` a group is selected when it is complete, so that the next stages can begin; places are kept
    for groups in their last iteration. With it all are selected at the end: those that took part longest, in
    ascending order.

    Args:
        spec: what is asked for.
        ages: [prompts] iterations that each group has been part of before.
        keep_order: select in ascending order.
    """

    def __init__(self, spec: Selection, ages: np.ndarray, keep_order: bool):
        self.spec, self.ages, self._keep_order = spec, ages, keep_order
        if not 1 <= integer("prompts of the selection", spec.prompts) <= len(ages):
            raise DockError(f"a selection of {spec.prompts} prompts: the iteration has {len(ages)}")
        integer("max_iterations", spec.max_iterations, least=1)
        self._last = ages + 1 >= spec.max_iterations
        if self._last.sum() > spec.prompts:
            raise DockError(
                f"{self._last.sum()} groups are in their last iteration of {spec.max_iterations}, "
                f"but only {spec.prompts} are selected: fewer prompts may be in generation at once"
            )
        self.complete = np.zeros(len(ages), bool)
        self.selected: list[int] = []

    @property
    def is_over(self) -> bool:
        """All groups are selected."""
        return len(self.selected) == self.spec.prompts

    @property
    def is_enough(self) -> bool:
        """Nothing more needs to be generated: groups in their last iteration are complete, or end where they are."""
        if self.is_over:
            return True
        reached = int(self.complete.sum()) if self._keep_order else len(self.selected)
        waiting = self._waiting
        return reached + waiting >= self.spec.prompts and not (self.spec.finish_oldest and waiting)

    @property
    def _waiting(self) -> int:
        """Groups in their last iteration that are not complete."""
        return int((self._last & ~self.complete).sum())

    def is_last(self, prompts: np.ndarray) -> np.ndarray:
        """Whether each prompt's group is in its last iteration."""
        return self._last[prompts]

    def completed(self, prompts: list[int]) -> list[int]:
        """These groups are complete; returns the groups that are selected now, in order."""
        new: list[int] = []
        for prompt in prompts:
            self.complete[prompt] = True
            if not self._keep_order and not self.is_over and self._has_place(prompt):
                self.selected.append(prompt)
                new.append(prompt)
        if self._keep_order and not self.is_over and not self._waiting and self.complete.sum() >= self.spec.prompts:
            oldest = sorted(np.flatnonzero(self.complete).tolist(), key=lambda prompt: (-self.ages[prompt], prompt))
            new = self.selected = sorted(oldest[: self.spec.prompts])
        return new

    def _has_place(self, prompt: int) -> bool:
        return bool(self._last[prompt]) or len(self.selected) + self._waiting < self.spec.prompts

    def left(self) -> list[int]:
        """Groups that are not selected, those that took part longest first."""
        others = sorted(set(range(len(self.ages))) - set(self.selected))
        return sorted(others, key=lambda prompt: -self.ages[prompt])

    def incomplete(self, prompts: list[int]) -> None:
        """Values of these groups were lost; those that are selected stay so."""
        self.complete[[prompt for prompt in prompts if prompt not in self.selected]] = False

    def state(self) -> dict[str, Any]:
        """Plain values that `restore` takes."""
        return {"ages": self.ages.copy(), "complete": self.complete.copy(), "selected": list(self.selected)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.complete, self.selected = state["complete"].copy(), list(state["selected"])
