"""Fused operators, computed from torch's own, with the checks that the operators' documentation states.

Interfaces: the pages of torch_npu's API reference on hiascend.com (`npu_fusion_attention`, `npu_rms_norm`,
`npu_rotary_mul`, `npu_swiglu`). A message here is not that of an NPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
COMPRESSED_MASK = (2048, 2048)  # of the sparse modes 2, 3 and 4, however long sequences are
RIGHT_DOWN_CAUSAL = 3


def _check(is_met: bool, message: str) -> None:
    if not is_met:
        raise RuntimeError(f"simulated npu: {message}")


def _check_on_npu(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        _check(tensor.device.type == "npu", f"a tensor of {tensor.device} was given to an operator of the npu")


def _check_ends(name: str, ends: Sequence[int] | None, tokens: int) -> list[int]:
    """Lengths of the sequences that end there."""
    _check(isinstance(ends, list | tuple) and all(type(end) is int for end in ends), f"{name} is a list of int")
    assert ends is not None
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    _check(bool(ends) and ends[-1] == tokens, f"{name} ends at {tokens}, the number of tokens, not {ends}")
    _check(min(lengths) >= 0, f"{name} is cumulative, not {ends}")
    return lengths


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Causal attention of packed sequences: layout TND, sparse mode 3. Nothing else is simulated.

    Returns:
        Output [T, heads, dimension]; maximum and sum of the softmax [T, heads, 8], empty here; and four more that are
        for the operator's own gradient.
    """
    _check(input_layout == "TND" and sparse_mode == RIGHT_DOWN_CAUSAL, "only TND in sparse mode 3 is simulated")
    _check(keep_prob == 1.0, "dropout is not simulated")
    assert atten_mask is not None, "sparse mode 3 takes a mask"
    _check_on_npu(query, key, value, atten_mask)
    _check(query.dtype == key.dtype == value.dtype and query.dtype in FLOATS, f"dtype {query.dtype}")
    _check(query.dim() == key.dim() == value.dim() == 3, "TND has three dimensions")
    tokens, heads, size = query.shape
    _check(heads == head_num, f"query has {heads} heads, head_num is {head_num}")
    _check(heads % key.shape[1] == 0 and key.shape[1] == value.shape[1], "heads are a multiple of key/value heads")
    _check(
        size == key.shape[2] and value.shape[2] <= size, "query and key are of one head dimension, value of no more"
    )
    _check(1 <= size <= 768 and heads <= 256, f"{heads} heads of {size}: at most 256 of 768")
    _check(atten_mask.dtype in (torch.bool, torch.uint8), "the mask is of bool or uint8")
    _check(tuple(atten_mask.shape) == COMPRESSED_MASK, f"the mask is of shape {COMPRESSED_MASK} in sparse mode 3")
    queries = _check_ends("actual_seq_qlen", actual_seq_qlen, tokens)
    keys = _check_ends("actual_seq_kvlen", actual_seq_kvlen, len(key))
    _check(len(queries) == len(keys), "actual_seq_qlen and actual_seq_kvlen are of one length")
    outputs = [
        _causal(q, k, v, scale)
        for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    ]
    nothing = query.new_empty(0, dtype=torch.float32)
    return torch.cat(outputs), nothing, nothing, query.new_empty(0), 0, 0, 0  # type: ignore[return-value]


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Of one sequence; the last query sees the last key. Computed in float32, as on the device."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (t.float().transpose(0, 1) for t in (query, key, value))
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    hidden = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden.triu(1 + len(key) - len(query)), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)


def npu_rms_norm(
    hidden: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed tensor, and the reciprocal root mean square [..., 1] in float32."""
    _check_on_npu(hidden, gamma)
    _check(hidden.dtype in FLOATS and gamma.dtype in FLOATS, f"dtypes {hidden.dtype} and {gamma.dtype}")
    _check(tuple(gamma.shape) == tuple(hidden.shape[-gamma.dim() :]), "gamma has the last dimensions of the input")
    wide = hidden.float()
    reciprocal = (wide.pow(2).mean(list(range(-gamma.dim(), 0)), keepdim=True) + epsilon).rsqrt()
    return (wide * reciprocal * gamma.float()).to(hidden.dtype), reciprocal


def npu_swiglu(hidden: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu of the first half times the second half."""
    _check_on_npu(hidden)
    _check(hidden.dtype in FLOATS and hidden.shape[dim] % 2 == 0, "an even number of floats is divided in halves")
    gate, up = hidden.chunk(2, dim=dim)
    return F.silu(gate) * up


def npu_rotary_mul(
    hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str = "half"
) -> torch.Tensor:
    """hidden * cos + rotated hidden * sin, in four dimensions."""
    _check_on_npu(hidden, cos, sin)
    _check(hidden.dim() == cos.dim() == sin.dim() == 4 and cos.shape == sin.shape, "of four dimensions")
    _check(hidden.shape[-1] == cos.shape[-1] and hidden.shape[-1] % 2 == 0, "of one even size in the last dimension")
    _check(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    if rotary_mode == "half":
        first, second = hidden.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-hidden[..., 1::2], hidden[..., ::2]), dim=-1).flatten(-2)
    return hidden * cos + turned * sin
