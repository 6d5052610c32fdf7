"""Lengths of responses before there are any."""

from __future__ import annotations

import math
from statistics import NormalDist


def lognormal_lengths(mean: float, longest: int, spread: float, count: int) -> list[int]:
    """`count` lengths, at equally spaced quantiles of a lognormal distribution cut off at `longest`, descending.

    Args:
        mean: of the lengths that come out, in tokens.
        longest: where responses are cut off.
        spread: standard deviation of the logarithm; 0: all have the mean.
        count: how many.

    Raises:
        ValueError: the mean is not between 1 and the longest.
    """
    if not 1 <= mean <= longest:
        raise ValueError(f"mean = {mean:g}: must be between 1 and the longest, {longest}")
    scores = [math.exp(spread * NormalDist().inv_cdf(1 - (index + 0.5) / count)) for index in range(count)]

    def lengths(scale: float) -> list[int]:
        return [min(longest, max(1, round(scale * score))) for score in scores]

    # the mean after cutting off grows with the scale
    low, high = 0.0, longest / min(scores)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) < mean * count else (low, middle)
    return lengths(high)
