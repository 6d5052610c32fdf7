"""A reward of one's own, for `rl_config.custom_reward_function`."""

from __future__ import annotations

import re


def last_number(prompt: str, response: str, label: str, **_extra: object) -> float:
    """1 if the last number of the response is the answer, else 0."""
    return float(re.findall(r"\d+", response)[-1:] == [label])
