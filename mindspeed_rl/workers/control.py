"""Small agreements between ranks, over gloo so that they never touch the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class ControlGroup:
    """Ranks that must act on the same decisions; `leader` takes them.

    Args:
        groups: a partition of all ranks into groups; every rank passes the same one (a collective).
        rank: this process's rank.
        timeout_minutes: deadline of every agreement.
        leader: picks the leader of a group.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        rank: int,
        timeout_minutes: float,
        leader: Callable[[Sequence[int]], int] = min,
    ):
        timeout = timedelta(minutes=timeout_minutes)
        for ranks in groups:
            group = dist.new_group(list(ranks), backend="gloo", timeout=timeout) if len(ranks) > 1 else None
            if rank in ranks:
                self.group, self.leader = group, leader(ranks)
        self.is_leader = rank == self.leader

    def share(self, decide: Callable[[], T]) -> T:
        """Every member gets what `decide` returns on the leader; it is called there only."""
        if self.group is None:
            return decide()
        box: list[T | None] = [decide() if self.is_leader else None]
        dist.broadcast_object_list(box, src=self.leader, group=self.group)
        return box[0]  # type: ignore[return-value]

    def any(self, value: bool) -> bool:
        """True if `value` is true on some member."""
        if self.group is None:
            return value
        flag = torch.tensor([value], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())
