"""Ring attention (Liu et al., arXiv:2310.01889): keys and values pass from rank to rank, results are put together.

Each rank has an equal contiguous part of a packed micro-batch's tokens, wherever sequences begin and end. What it
needs of earlier parts is of one sequence, that of its own first token: its first tokens, as far as that sequence
reaches, attend without a mask to that sequence's keys, which are the last ones of each part back to its beginning.
So the ring is open: keys and values go to the next rank as long as it needs them, then nothing is sent. Of a sequence
over many parts the last ones have the most to attend to, and the others wait for them.

Attention over a union of keys follows from output O and log-sum-exp l of its pieces (same paper, and section 3.1 of
arXiv:2205.14135): l = log(exp(l1) + exp(l2)), O = exp(l1 - l) O1 + exp(l2 - l) O2. The gradient of a piece needs its
queries, keys and values, and O and l of the whole. Any number of heads will do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.device.base import BlockAttention
from mindspeed_rl.engine.megatron.packing import PackedSequences

_Pair = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # keys and values, or their gradients


def open_ring(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL wants the first call of a group to be of all its ranks; later some may have nothing to pass on."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: PackedSequences,
    group: dist.ProcessGroup,
    attention: BlockAttention,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention inside each of the packed sequences, whose tokens the ranks of `group` share.

    Args:
        query: [T/cp, heads, head dimension], this rank's part.
        key: [T/cp, key/value heads, head dimension]; `heads` is a multiple of it.
        value: as `key`.
        sequences: where the sequences lie in all T tokens.
        group: `cp` ranks, in the order of their parts.
        attention: the device's kernels.
        scale: what scores are multiplied with; None: head dimension^-1/2.

    Returns:
        [T/cp, heads, head dimension].
    """
    parts = Parts.of(sequences.starts, group.size())
    ring = _Ring(group, group.rank(), parts, attention, scale, *_own_sequences(sequences, parts, group.rank()))
    attended: torch.Tensor = _RingAttention.apply(ring, query, key, value)
    return attended


@dataclass(frozen=True)
class Parts:
    """Which tokens of earlier parts matter to a rank: known to all ranks, on the host."""

    length: int  # tokens of a part
    spans: tuple[tuple[int, int], ...]  # of each part: where the sequence of its first token begins and ends

    @classmethod
    def of(cls, starts: Sequence[int], size: int) -> Parts:
        """`size` parts of sequences that lie between neighbours of `starts`."""
        length = starts[-1] // size
        after = [bisect_right(starts, part * length) for part in range(size)]
        return cls(length, tuple((starts[place - 1], starts[place]) for place in after))

    @property
    def steps(self) -> int:
        """How many parts back the rank with the longest way looks."""
        return max(rank - begin // self.length for rank, (begin, _) in enumerate(self.spans))

    def queries(self, rank: int) -> int:
        """Tokens of the rank's part, its first ones, that are of the same sequence as its very first."""
        return min(self.spans[rank][1] - rank * self.length, self.length)

    def keys(self, rank: int, back: int) -> int:
        """Tokens of the part `back` before the rank's, its last ones, that those queries attend to."""
        if rank >= len(self.spans):
            return 0
        end = (rank - back + 1) * self.length
        return min(max(end - self.spans[rank][0], 0), self.length)


def _own_sequences(sequences: PackedSequences, parts: Parts, rank: int) -> tuple[torch.Tensor, int]:
    """What sequences are in the rank's part alone: `cu_seqlens` and a bound for the longest, without a copy to it."""
    first = rank * parts.length
    begin = bisect_right(sequences.starts, first) - 1
    end = bisect_right(sequences.starts, first + parts.length - 1)
    cu_seqlens = (sequences.cu_seqlens_q[begin : end + 1] - first).clamp(0, parts.length)
    return cu_seqlens, min(sequences.max_seqlen_q, parts.length)


class _Transfer:
    """A tensor on its way to one rank of a group, and one from another; either may be missing."""

    def __init__(
        self, group: dist.ProcessGroup, to: int, sent: torch.Tensor | None, source: int, received: torch.Tensor | None
    ):
        self._sent, self._received = sent, received  # memory must stay until it has left
        operations = []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent, dist.get_global_rank(group, to), group))
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, dist.get_global_rank(group, source), group))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> torch.Tensor | None:
        """What has been received."""
        for work in self._works:
            work.wait()
        return self._received


@dataclass(frozen=True)
class _Ring:
    """One rank's place in the ring. Keys and values on their way are [2, tokens, key/value heads, dimension]."""

    group: dist.ProcessGroup
    rank: int
    parts: Parts
    attention: BlockAttention
    scale: float | None
    cu_seqlens: torch.Tensor  # of the sequences in the rank's own part
    max_seqlen: int

    def pass_on(self, step: int, block: _Pair | None, like: torch.Tensor) -> _Transfer:
        """To the next rank what it needs of `block`, step - 1 parts before; from the previous one the next block."""
        wanted = self.parts.keys(self.rank + 1, step)
        sent = None
        if wanted:
            assert block is not None, "the next rank needs what this one needs, and of this one's own part"
            sent = torch.stack([of_both[-wanted:] for of_both in block])
        return _Transfer(
            self.group, self.rank + 1, sent, self.rank - 1, self._empty(like, self.parts.keys(self.rank, step))
        )

    def give_back(self, step: int, gradient: torch.Tensor | None, like: torch.Tensor) -> _Transfer:
        """To the owner the gradient of the part `step` before; from the part `step` after that of this one's."""
        mine = self.parts.keys(self.rank + step, step)
        return _Transfer(self.group, self.rank - step, gradient, self.rank + step, self._empty(like, mine))

    @staticmethod
    def _empty(like: torch.Tensor, tokens: int) -> torch.Tensor | None:
        return like.new_empty(2, tokens, *like.shape[1:]) if tokens else None

    def attend(self, query: torch.Tensor, block: _Pair, own: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of attention to another part, or causally to one's own."""
        key, value = _for_each_head(block, query.shape[1])
        return self.attention.forward(query, key, value, *self._sequences(own), self.scale)

    def differentiate(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        block: _Pair,
        output: torch.Tensor,
        lse: torch.Tensor,
        own: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the queries and of `block` through this part, given output and log-sum-exp over all parts."""
        key, value = _for_each_head(block, query.shape[1])
        of_query, *of_block = self.attention.backward(
            gradient, query, key, value, output, lse, *self._sequences(own), self.scale
        )
        heads = block[0].shape[1]
        return of_query, torch.stack(of_block).unflatten(2, (heads, -1)).sum(3)

    def _sequences(self, own: bool) -> tuple[torch.Tensor | None, int]:
        return (self.cu_seqlens, self.max_seqlen) if own else (None, 0)


def _for_each_head(block: _Pair, heads: int) -> list[torch.Tensor]:
    """Key/value heads, repeated for the query heads that share them."""
    repeats = heads // block[0].shape[1]
    return [of_both.repeat_interleave(repeats, 1) if repeats > 1 else of_both for of_both in block]


def _merge(output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Attention to further keys, put together with that to others, in place."""
    of_all = torch.logaddexp(lse, more_lse)
    output.mul_((lse - of_all).exp()[..., None]).add_(more * (more_lse - of_all).exp()[..., None])
    lse.copy_(of_all)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        moving = ring.pass_on(1, (key, value), key)
        output, lse = ring.attend(query, (key, value), own=True)
        output = output.to(_wide(query))
        first = ring.parts.queries(ring.rank)
        for step in range(1, ring.parts.steps + 1):
            block = moving.wait()
            moving = ring.pass_on(step + 1, block, key)
            if block is not None:
                _merge(output[:first], lse[:first], *ring.attend(query[:first], block))
        output = output.to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values pass by once more; gradients go straight back to the ranks whose part they are of."""
        ring: _Ring = ctx.ring
        query, key, value, output, lse = ctx.saved_tensors
        moving, returning = ring.pass_on(1, (key, value), key), None
        own = ring.differentiate(gradient, query, (key, value), output, lse, own=True)
        of_query, of_own = (of_each.to(_wide(query)) for of_each in own)
        first = ring.parts.queries(ring.rank)
        for step in range(1, ring.parts.steps + 1):
            block, of_block = moving.wait(), None
            moving = ring.pass_on(step + 1, block, key)
            if block is not None:
                further, of_block = ring.differentiate(
                    gradient[:first], query[:first], block, output[:first], lse[:first]
                )
                of_query[:first] += further
            _add_to_last(of_own, returning)
            returning = ring.give_back(step, of_block, key)
        _add_to_last(of_own, returning)
        of_key, of_value = of_own.to(key.dtype)
        return None, of_query.to(query.dtype), of_key, of_value


def _add_to_last(of_own: torch.Tensor, returning: _Transfer | None) -> None:
    received = returning.wait() if returning else None
    if received is not None:
        of_own[:, -received.shape[1] :] += received


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
