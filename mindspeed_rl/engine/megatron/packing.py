"""Packs sequences end to end into the one input format of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mindspeed_rl.types import RolloutBatch


_NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class PackedMicroBatch:
    """A micro-batch on the device, `B` sequences in `T` tokens without padding between them."""

    batch: RolloutBatch  # the sequences themselves, on the host
    tokens: torch.Tensor  # [1, T], int64
    positions: torch.Tensor  # [1, T], int64
    params: PackedSeqParams
    predictors: torch.Tensor  # [R], int64: index in T of the token whose logits predict each response token
    targets: torch.Tensor  # [R], int64: the response tokens


def pack(batch: RolloutBatch, device: torch.device, multiple: int = 1) -> PackedMicroBatch:
    """Pack `batch`; `T` is rounded up to `multiple` with one sequence of padding at the end.

    No sequence at all gives `multiple` tokens of padding: it does nothing but keep a pipeline in step.
    """
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
    cu_seqlens = starts.to(device=device, dtype=torch.int32)
    longest = max(len(sequence) for sequence in sequences)
    return PackedMicroBatch(
        batch=batch,
        tokens=torch.cat(sequences)[None].to(device),
        positions=torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None].to(device),
        params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        predictors=torch.cat([_NOTHING, *predictors]).to(device),
        targets=torch.cat([_NOTHING, *batch.responses]).to(device),
    )
