"""Means, pass@k and majorities against counts by hand and by brute force."""

import itertools
import math

import pytest

from mindspeed_rl.metrics.evaluation import (
    Evaluated,
    best_at_k,
    flat,
    majority_at_k,
    majority_is_right,
    metrics_by_source,
    pass_at_k,
)
from mindspeed_rl.rewards.verifiers import final_answer


def response(prompt: int, reward: float, answer: str = "", source: str = "a", **verifiers: float) -> Evaluated:
    return Evaluated(prompt, source, reward, verifiers or {"acc": reward}, answer, length=10)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n: int) -> None:
    for right in range(n + 1):
        for k in range(1, n + 1):
            draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["7", "8", "7"], [1, 0, 1], True),
        (["8", "7", "8"], [0, 1, 0], False),
        (["7", "8"], [1, 0], True),  # as often: the first
        (["8", "7"], [0, 1], False),
        (["8", "7", "7", "8", "7"], [0, 1, 1, 0, 1], True),
    ],
)
def test_the_most_frequent_answer_counts(answers: list[str], rewards: list[float], expected: bool) -> None:
    group = [response(0, reward, answer) for answer, reward in zip(answers, rewards, strict=True)]
    assert majority_is_right(group, "reward") is expected


@pytest.mark.parametrize("k", range(1, 6))
def test_best_at_k_is_the_mean_of_the_largest_of_all_draws(k: int) -> None:
    values = [0.5, -1.0, 2.0, 0.5, math.nan, 1.0]
    draws = list(itertools.combinations([value for value in values if not math.isnan(value)], k))
    assert best_at_k(values, k) == pytest.approx(sum(map(max, draws)) / len(draws))
    assert math.isnan(best_at_k(values, 6))
    right = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert best_at_k(right, k) == pytest.approx(pass_at_k(5, 2, k))


def test_majorities_of_some_responses() -> None:
    # of three, two say 7, which is right: pairs (7, 7), (7, 8), (8, 7), of which the last goes wrong
    group = [response(0, 1, "7"), response(0, 0, "8"), response(0, 1, "7")]
    assert [majority_at_k(group, "reward", k) for k in (1, 2, 3)] == pytest.approx([2 / 3, 2 / 3, 1.0])
    # of 20, 12 say it: too many draws of 10 to look at all; where 7 is not the majority, it may be the first of two
    many = [response(0, float(i % 5 < 3), "7" if i % 5 < 3 else "8") for i in range(20)]
    share, draws = majority_at_k(many, "reward", 10), math.comb(20, 10)
    least = sum(math.comb(12, i) * math.comb(8, 10 - i) for i in range(6, 11)) / draws
    most = sum(math.comb(12, i) * math.comb(8, 10 - i) for i in range(5, 11)) / draws
    assert least - 0.04 < share < most + 0.04
    assert majority_at_k(many, "reward", 10) == share  # the same draws


def test_each_source_and_all_are_counted() -> None:
    rewards = {0: ("a", [1, 1, 0, 0]), 1: ("a", [0, 0, 0, 0]), 2: ("b", [-1, 1, math.nan, 1])}
    responses = [
        response(prompt, reward, str(reward), source)
        for prompt, (source, group) in rewards.items()
        for reward in group
    ]
    found = flat(metrics_by_source(responses, "reward"))
    assert found["a/reward/mean"] == pytest.approx(2 / 8)
    assert found["b/reward/mean"] == pytest.approx(1 / 3)  # of what could be scored
    assert found["all/reward/mean"] == pytest.approx(3 / 11)
    assert (found["a/failed"], found["b/failed"], found["all/failed"]) == (0, 1, 1)
    assert found["a/pass@1"] == pytest.approx((2 / 4 + 0) / 2)
    assert found["a/pass@2"] == pytest.approx((1 - 1 / 6 + 0) / 2)
    assert found["a/pass@4"] == pytest.approx(1 / 2)
    assert found["b/pass@1"] == pytest.approx(2 / 4)  # what could not be scored is not right
    assert found["all/pass@4"] == pytest.approx(2 / 3)
    assert found["a/maj@4"] == pytest.approx((1 + 0) / 2)
    assert found["all/response_length/mean"] == 10
    assert "a/pass@3" not in found


def test_a_verifier_can_decide_what_is_right() -> None:
    responses = [response(0, 2.0, acc=0.0, format=1.0), response(1, 0.5, acc=1.0, format=0.0)]
    assert metrics_by_source(responses, "reward")["all"]["pass@1"] == 1
    found = flat(metrics_by_source(responses, "acc"))
    assert (found["all/pass@1"], found["all/acc/mean"], found["all/format/mean"]) == (0.5, 0.5, 0.5)
    assert "all/maj@1" not in found


def test_three_responses_have_pass_at_three() -> None:
    assert {"all/pass@1", "all/pass@2", "all/pass@3", "all/maj@3"} <= set(
        flat(metrics_by_source([response(0, 1.0)] * 3, "reward"))
    )


def test_nothing_cannot_be_evaluated() -> None:
    with pytest.raises(ValueError, match="no responses"):
        metrics_by_source([], "reward")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3} or \boxed{ 4 }", "4"),
        ("Thus.\nAnswer: 12", "12"),
        ("first line\n 5 ", "5"),
        ("", ""),
    ],
)
def test_what_a_response_comes_to(text: str, answer: str) -> None:
    assert final_answer(text) == answer
