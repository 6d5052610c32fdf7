"""What many responses to each prompt say: means, pass@k, best@k, maj@k, for each data source and for all."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DRAWS = 1000  # of responses for a majority of some of them
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
    - `best@k` for these k above 1: with a prompt's values of `metric` v_1 ≤ … ≤ v_n, the mean over prompts of
      Σ v_i C(i-1, k-1) / C(n, k), the expected largest of k drawn without putting back (the largest order statistic,
      with which pass@k is the same for values of 0 and 1). What could not be scored is left out, and prompts with
      fewer than k values, too.
    - `maj@k` for these k: the share of draws of k responses whose most frequent answer is right, of equally frequent
      ones the first; over all draws, or `DRAWS` random ones where there are more, mean over prompts.

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
        if k > 1:
            scored = [[response.value(metric) for response in group] for group in groups.values()]
            found[f"best@{k}"] = _mean([best_at_k(of_group, k) for of_group in scored])
            found[f"maj@{k}"] = _mean([majority_at_k(group, metric, k) for group in groups.values()])
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


def best_at_k(values: Sequence[float], k: int) -> float:
    """The expected largest of k values, drawn without putting back; NaN if there are fewer numbers than that."""
    numbers = sorted(value for value in values if not math.isnan(value))
    if len(numbers) < k:
        return math.nan
    return sum(value * math.comb(i, k - 1) for i, value in enumerate(numbers)) / math.comb(len(numbers), k)


def majority_at_k(group: Sequence[Evaluated], metric: str, k: int) -> float:
    """The share of draws of k responses, in their order, whose majority is right."""
    if math.comb(len(group), k) <= DRAWS:
        draws = [list(draw) for draw in itertools.combinations(group, k)]
    else:
        rng = random.Random(0)  # the same draws at every validation
        draws = [[group[index] for index in sorted(rng.sample(range(len(group)), k))] for _ in range(DRAWS)]
    return sum(majority_is_right(draw, metric) for draw in draws) / len(draws)


def majority_is_right(group: Sequence[Evaluated], metric: str) -> bool:
    """Whether the first response with the most frequent answer is right."""
    counts = Counter(response.answer for response in group)  # in the order of first appearance
    (answer, _), *_ = counts.most_common(1)
    return next(response.value(metric) > 0 for response in group if response.answer == answer)
