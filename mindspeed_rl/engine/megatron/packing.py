"""Packs sequences end to end into the one input format of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mindspeed_rl.types import RolloutBatch

_NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's, and the same for the host, which then never has to wait for the device."""

    starts: tuple[int, ...] = ()  # [B + 1]: cu_seqlens


@dataclass(frozen=True)
class PackedMicroBatch:
    """A micro-batch on the device, `B` sequences in `T` tokens without padding between them."""

    batch: RolloutBatch  # the sequences themselves, on the host
    tokens: torch.Tensor  # [1, T/cp], int64: this context-parallel rank's part
    positions: torch.Tensor  # [1, T/cp], int64: of the tokens in their sequences
    params: PackedSequences  # of all T tokens
    targets: torch.Tensor  # [R], int64: all response tokens
    predictors: torch.Tensor  # [r], int64: index in T/cp of those tokens whose logits predict response tokens
    predicted: torch.Tensor  # [r], int64: which of the R response tokens each of them predicts
    reference: torch.Tensor | None = None  # [r, hidden]: the reference's final hidden states at `predictors`


@dataclass(frozen=True)
class Part:
    """The `rank`-th of `size` equal parts of a packed micro-batch, whose length is a multiple of `multiple`."""

    rank: int = 0
    size: int = 1
    multiple: int = 1


def pack(batch: RolloutBatch, device: torch.device, part: Part = Part()) -> PackedMicroBatch:
    """Pack `batch`, with one sequence of padding at the end if its `T` tokens do not divide into the parts.

    No sequence at all gives padding alone: it does nothing but keep a pipeline in step.
    """
    multiple = part.size * part.multiple
    sequences = [torch.cat(pair) for pair in zip(batch.prompts, batch.responses, strict=True)]
    lengths = [len(sequence) for sequence in sequences]
    padding = -sum(lengths) % multiple if lengths else multiple
    if padding:
        sequences.append(torch.zeros(padding, dtype=torch.int64))
    starts = torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0)
    predictors = [
        torch.arange(len(response)) + start + len(prompt) - 1
        for start, prompt, response in zip(starts.tolist(), batch.prompts, batch.responses, strict=False)
    ]
    total = sum(len(sequence) for sequence in sequences)
    mine = slice(part.rank * total // part.size, (part.rank + 1) * total // part.size)
    of_all = torch.cat([_NOTHING, *predictors])
    predicted = torch.nonzero((of_all >= mine.start) & (of_all < mine.stop))[:, 0]
    cu_seqlens = starts.to(device=device, dtype=torch.int32)
    longest = max(len(sequence) for sequence in sequences)
    return PackedMicroBatch(
        batch=batch,
        tokens=torch.cat(sequences)[None, mine].to(device),
        positions=torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None, mine].to(device),
        params=PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            starts=tuple(starts.tolist()),
        ),
        predictors=(of_all[predicted] - mine.start).to(device),
        predicted=predicted.to(device),
        targets=torch.cat([_NOTHING, *batch.responses]).to(device),
    )
