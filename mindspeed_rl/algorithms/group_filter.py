"""Which groups tell better responses from worse ones: dynamic sampling (DAPO, arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def differs_within(metric: Sequence[float], rewards: Sequence[float]) -> bool:
    """Whether the metric's standard deviation over the group's scored samples is above 0.

    A sample is scored if neither its metric nor its reward is NaN; with fewer than two of them nothing differs.
    Compared in float32, which rewards are trained on in: what is equal there gives no advantage.

    Args:
        metric: [G] of the group's samples.
        rewards: [G] the same samples' rewards.
    """
    scored = {
        np.float32(value) for value, reward in zip(metric, rewards, strict=True) if not math.isnan(value + reward)
    }
    return len(scored) > 1
