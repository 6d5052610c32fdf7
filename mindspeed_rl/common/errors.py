"""Every error a user can meet. Each message names what was wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class MindSpeedRLError(Exception):
    """Base class: the command line prints its message without a traceback and exits non-zero."""

    exit_code = 1


@dataclass(frozen=True)
class Violation:
    """One broken rule of a configuration: the full key path, the value found there, the rule, a way out."""

    path: str
    value: Any
    message: str
    suggestion: str | None = None

    def __str__(self) -> str:
        text = f"{self.path} = {self.value!r}: {self.message}"
        return f"{text} ({self.suggestion})" if self.suggestion else text


class ConfigError(MindSpeedRLError, ValueError):
    """All violations of a configuration, reported together."""

    exit_code = 2

    def __init__(self, violations: Sequence[Violation]):
        self.violations = list(violations)
        count = len(self.violations)
        head = f"{count} configuration error{'s' if count != 1 else ''}:"
        super().__init__("\n".join([head, *(f"  - {violation}" for violation in self.violations)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.violations,)  # else it would be made of its own text, where a worker has raised it


class SetupError(MindSpeedRLError, RuntimeError):
    """A process that cannot be prepared for its work: something comes too late, or does not go together."""


class DataError(MindSpeedRLError, ValueError):
    """A data set, tokenizer or sample that cannot be used; names the file and line."""


class CheckpointError(MindSpeedRLError, ValueError):
    """A checkpoint that is missing, corrupt, or does not fit the model or layout."""


class WeightMismatch(MindSpeedRLError, RuntimeError):
    """Rollout does not compute with the weights of training; names the tensors (see `validate_weight`)."""


class DockError(MindSpeedRLError, ValueError):
    """A misuse of the TransferDock: unknown column, wrong shape or dtype, cleared iteration, foreign lease."""


class RowsLost(DockError):
    """Values in the TransferDock are gone with the process that put them; the dock has their rows made again."""


class DockTimeout(MindSpeedRLError, TimeoutError):
    """A wait on the TransferDock that passed its deadline; says what it waited for."""


class WorkerFailed(MindSpeedRLError, RuntimeError):
    """A worker died, raised or passed its deadline: names rank (or who else, see `NOT_RANKS`), stage and step."""

    exit_code = 3
    NOT_RANKS: ClassVar[dict[int, str]] = {-1: "the reward worker", -2: "the weight board"}

    def __init__(self, rank: int, stage: str, step: int, reason: str):
        self.rank, self.stage, self.step, self.reason = rank, stage, step, reason
        who = self.NOT_RANKS.get(rank, f"worker rank {rank}")
        super().__init__(f"{who} failed in stage '{stage}' at step {step}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.stage, self.step, self.reason)


class NodeLost(MindSpeedRLError, RuntimeError):
    """A node that held ranks has left the cluster (preempted, crashed, cut off): names it, them, and how to go on."""

    exit_code = 3

    def __init__(self, node: str, ranks: str, stage: str, step: int, reason: str, way_out: str):
        self.arguments = (node, ranks, stage, step, reason, way_out)
        super().__init__(f"node {node} was lost with {ranks} in stage '{stage}' at step {step}: {reason}\n{way_out}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.arguments
