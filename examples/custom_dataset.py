"""A data set of one's own: sums, as many as a text file has lines with two numbers each.

megatron_training.data_path=sums.json megatron_training.custom_dataset.path=examples/custom_dataset.py
megatron_training.custom_dataset.name=Sums
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Sums:
    """Read once, when a run starts; a run that is resumed must find the same rows in the same order.

    Args:
        files: what `data_path` names.
        tokenizer: that of the run.
        config: `megatron_training` with what `actor_config` changes.
    """

    def __init__(self, files: Sequence[str], tokenizer: Any, config: Any):
        self.pairs: list[tuple[int, int]] = []
        for file in files:
            with open(file, encoding="utf-8") as lines:
                self.pairs += [(int(left), int(right)) for left, right in map(str.split, lines)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        left, right = self.pairs[index]
        return {
            "prompt": f"{left}+{right}=",
            "answer": str(left + right),
            "data_source": "sums",
            "extra": {"largest": max(left, right)},
        }
