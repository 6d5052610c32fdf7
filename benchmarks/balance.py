"""Shares of equal cost and token-capped micro-batches, against contiguous shares and micro-batches of fixed size.

1,024 sequences of a 7B model in mini-batches of 256: prompts uniform from 64 to 1,023 tokens, responses lognormal
(median 665, at most 8,192). `python benchmarks/balance.py`
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
from records import Record, cpu_name, publish

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.data.packing import balanced_partition, imbalance, micro_batches, sequence_costs

SEQUENCES, MINI_BATCH, SHARES = 1024, 256, (8, 64)
LONGEST = 1024 + 8192  # tokens: what a micro-batch of fixed size must have room for


def make_lengths() -> list[int]:
    """[SEQUENCES] tokens, prompt and response."""
    rng = np.random.default_rng(0)
    responses = np.clip(rng.lognormal(6.5, 0.9, SEQUENCES), 16, 8192).astype(int)
    return (responses + rng.integers(64, 1024, SEQUENCES)).tolist()


def slices(values: Sequence[int], size: int) -> list[Sequence[int]]:
    """`values` in order, `size` at a time."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def shares(costs: list[int], parts: int) -> list[Record]:
    """Imbalance of both ways to share, mean over mini-batches; the limit: somebody has the longest sequence."""
    mini_batches = slices(costs, MINI_BATCH)
    start = time.perf_counter()
    partitions = [balanced_partition(mini_batch, parts) for mini_batch in mini_batches]
    milliseconds = 1e3 * (time.perf_counter() - start) / len(mini_batches)
    contiguous = slices(range(MINI_BATCH), MINI_BATCH // parts)
    kk = [imbalance(mini_batch, partition) for mini_batch, partition in zip(mini_batches, partitions, strict=True)]
    uniform = [imbalance(mini_batch, contiguous) for mini_batch in mini_batches]
    limit = []
    for mini_batch in mini_batches:
        *others, longest = sorted(mini_batch)
        least = longest + sum(others[: MINI_BATCH // parts - 1])  # beside the shortest ones
        limit.append(max(1.0, least * parts / sum(mini_batch)))
    note, bound = f"{parts} shares of {MINI_BATCH}, largest cost over mean", statistics.mean(limit)
    return [
        Record("balance.kk_imbalance", statistics.mean(kk), "", bound, statistics.mean(uniform), note),
        Record("balance.uniform_imbalance", statistics.mean(uniform), "", bound, note=note),
        Record("balance.kk_ms", milliseconds, "ms", note=f"{parts} shares of a mini-batch of {MINI_BATCH}"),
    ]


def fill(lengths: list[int], costs: list[int], size: int) -> list[Record]:
    """Tokens over what all micro-batches have room for; the 8 ranks of a mini-batch make the same number of them."""
    cap, ranks = size * LONGEST, SHARES[0]
    room = fixed_room = passes = fixed_passes = 0
    for own_lengths, own_costs in zip(slices(lengths, MINI_BATCH), slices(costs, MINI_BATCH), strict=True):
        of_ranks = [[own_lengths[index] for index in part] for part in balanced_partition(own_costs, ranks)]
        count = max(len(micro_batches(own, cap)) for own in of_ranks)
        assert all(len(micro_batches(own, cap, at_least=count)) == count for own in of_ranks)
        fixed_count = -(-MINI_BATCH // ranks // size)
        passes, fixed_passes = passes + count, fixed_passes + fixed_count
        room, fixed_room = room + count * ranks * cap, fixed_room + fixed_count * ranks * cap
    tokens = sum(lengths)
    note = f"cap {cap:,} tokens, {passes} passes a rank; fixed size {size}: {fixed_passes}"
    return [
        Record("balance.micro_batch_fill", tokens / room, "", 1.0, tokens / fixed_room, note),
        Record("balance.fixed_micro_batch_fill", tokens / fixed_room, "", 1.0, note=note),
    ]


def main() -> None:
    """Compute and publish."""
    lengths = make_lengths()
    config, _ = load_config("grpo_trainer_qwen25_7b")
    costs = sequence_costs(lengths, resolve_model(config))
    records = [record for parts in SHARES for record in shares(costs, parts)]
    records += [record for size in (1, 2, 4) for record in fill(lengths, costs, size)]
    publish("balance-cpu", records, cpu_name())


if __name__ == "__main__":
    main()
