"""The bound on log-ratios of probabilities, wherever they are exponentiated."""

from __future__ import annotations

from torch import Tensor

# exp of more than 88 overflows float32, and the gradient of a clipped infinity is NaN; 20 leaves room for products
MAX_LOG_RATIO = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` within ±20, of the same shape; no gradient beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
