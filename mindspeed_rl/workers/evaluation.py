"""Scores of responses that are not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rl.data.prompts import PromptSample
from mindspeed_rl.metrics.evaluation import Evaluated
from mindspeed_rl.rewards.manager import RewardManager
from mindspeed_rl.rewards.verifiers import RewardSample, final_answer


def reward_samples(samples: Sequence[PromptSample], texts: Sequence[str]) -> list[RewardSample]:
    """What verifiers see of responses: the prompts' side, and the texts."""
    return [
        RewardSample(sample.prompt_text, text, sample.label, sample.extra, sample.data_source)
        for sample, text in zip(samples, texts, strict=True)
    ]


def evaluate_texts(
    manager: RewardManager, samples: Sequence[PromptSample], texts: Sequence[str], prompts: Sequence[int]
) -> list[Evaluated]:
    """Score responses, whose length is told in characters.

    Args:
        manager: runs the verifiers.
        samples: of each response.
        texts: the responses.
        prompts: number of the prompt that each answers.
    """
    result = manager.score(reward_samples(samples, texts))
    return [
        Evaluated(
            prompt=prompts[index],
            source=samples[index].data_source,
            reward=result.total[index],
            verifiers={name: values[index] for name, values in result.values.items()},
            answer=final_answer(text),
            length=len(text),
        )
        for index, text in enumerate(texts)
    ]


def response_row(sample: PromptSample, found: Evaluated, text: str) -> dict[str, Any]:
    """A response with what it got, for people and files."""
    return {
        "prompt": sample.prompt_text,
        "response": text,
        "label": sample.label,
        "data_source": sample.data_source,
        "reward": found.reward,
        **found.verifiers,
    }
