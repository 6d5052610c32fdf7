"""What many responses to each prompt say: means, pass@k, maj@k, for each data source and for all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALL = "all"  # stands for all sources together; a source of that name would be hidden by it


@dataclass(frozen=True)
class Evaluated:
    """One response. What could not be scored is NaN."""

    prompt: int  # which one it answers
    source: str
    reward: float
    verifiers: Mapping[str, float]
    answer: str  # what it comes to, for the majority
    length: int  # tokens

    def value(self, metric: str) -> float:
        """The reward, or a verifier's score."""
        return self.reward if metric == "reward" else self.verifiers[metric]


def flat(by_source: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """`{source}/{name}`: not to be taken apart again, for names of sources may hold slashes (`openai/gsm8k`)."""
    return {f"{source}/{name}": value for source, found in by_source.items() for name, value in found.items()}


def metrics_by_source(responses: Sequence[Evaluated], metric: str) -> dict[str, dict[str, float]]:
    """Source -> name -> value, over each source's responses and over `all`. Sources may differ in n.

    - `reward/mean`, `{verifier}/mean`: over what could be scored; `failed`: responses whose `metric` could not.
    - `response_length/mean`: tokens.
    - `pass@k` for k = 1, 2, 4, … and n: with c of a prompt's n responses right, which is `metric` above 0, the mean
      over prompts of 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, section 2.1).
    - `maj@n`: the share of prompts whose most frequent answer is right; of equally frequent ones the first.

    Raises:
        ValueError: there are no responses.
    """
    if not responses:
        raise ValueError("there are no responses to evaluate")
    sources = (*sorted({response.source for response in responses}), ALL)
    return {
        source: _metrics([response for response in responses if source in (response.source, ALL)], metric)
        for source in sources
    }


def _metrics(responses: Sequence[Evaluated], metric: str) -> dict[str, float]:
    values = {"reward": [response.reward for response in responses]}
    values |= {name: [response.verifiers[name] for response in responses] for name in responses[0].verifiers}
    found = {f"{name}/mean": _mean(each) for name, each in values.items()}
    found["failed"] = float(sum(math.isnan(response.value(metric)) for response in responses))
    found["response_length/mean"] = _mean([float(response.length) for response in responses])
    groups: dict[int, list[Evaluated]] = {}
    for response in responses:
        groups.setdefault(response.prompt, []).append(response)
    most = min(map(len, groups.values()))
    for k in sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most}):
        found[f"pass@{k}"] = _mean([pass_at_k(len(group), _right(group, metric), k) for group in groups.values()])
    if most > 1:
        found[f"maj@{most}"] = _mean([float(majority_is_right(group[:most], metric)) for group in groups.values()])
    return found


def _mean(values: Sequence[float]) -> float:
    """Over those that are numbers; NaN if none is."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _right(group: Sequence[Evaluated], metric: str) -> int:
    return sum(response.value(metric) > 0 for response in group)


def pass_at_k(n: int, right: int, k: int) -> float:
    """The probability that of k responses, drawn from n without putting back, one is right."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def majority_is_right(group: Sequence[Evaluated], metric: str) -> bool:
    """Whether the first response with the most frequent answer is right."""
    counts = Counter(response.answer for response in group)  # in the order of first appearance
    (answer, _), *_ = counts.most_common(1)
    return next(response.value(metric) > 0 for response in group if response.answer == answer)
