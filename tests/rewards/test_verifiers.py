"""Every verifier against hand-made cases."""

import subprocess
import sys

import pytest

from mindspeed_rl.config import rules
from mindspeed_rl.rewards.verifiers import VERIFIERS, RewardSample, answers_equal, last_boxed, normalise, verifier

GOOD = r"<think>three and four</think> <answer>\boxed{7}</answer>"


def score(name: str, response: str, label: str = "7", **extra) -> float:
    return VERIFIERS[name].score(RewardSample("3+4=", response, label, extra))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{7}", "7"),
        (r"first \boxed{1}, then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {a{b}{c{d}}}", "a{b}{c{d}}"),
        (r"\boxed{done} and \boxed{cut off", "done"),  # a truncated response keeps its complete answer
        (r"\boxed{cut off", None),
        (r"\boxed{}", ""),
        ("7", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        ("7", "7", True),
        (" 7. ", "7", True),
        ("7.0", "7", True),
        ("1,234", "1234", True),
        ("1,234,567.5", "1234567.50", True),
        ("$7$", "7", True),
        (r"\text{B}", "B", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\frac{1}{2}", "0.5", True),
        ("1/2", "0.5", True),
        ("x+y", "y+x", True),
        (r"\left(1, 2\right)", "(1,2)", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("8", "7", False),
        ("-7", "7", False),
        ("70", "7", False),
        ("(1,234)", "(1234)", False),  # a pair, not a grouped number
        ("x", "y", False),
        ("", "7", False),
        ("", "", False),
        (r"\frac{", "7", False),
        ("nan", "7", False),
    ],
)
def test_answers_equal(answer, label, equal):
    assert answers_equal(answer, label) is equal


def test_normalise_keeps_meaning():
    assert normalise(r"\leftarrow") == r"\leftarrow"
    assert normalise(r"50\%") == "50%"


@pytest.mark.parametrize(
    ("name", "response", "expected"),
    [
        ("acc", r"so \boxed{7}", 1.0),
        ("acc", r"so \boxed{8}", -0.5),
        ("acc", r"\boxed{}", -0.5),
        ("acc", "so 7", -1.0),
        ("acc", "", -1.0),
        ("format", GOOD, 1.0),
        ("format", "intro <think>\na\n</think>\n<answer>b</answer> outro", 1.0),
        ("format", "<answer>7</answer><think>a</think>", 0.0),
        ("format", "<think>a</think> 7", 0.0),
        ("format", "", 0.0),
        ("strict_format", GOOD, 1.0),
        ("strict_format", f"\n{GOOD}\n", 1.0),
        ("strict_format", f"Sure! {GOOD}", -0.5),
        ("strict_format", f"{GOOD} done", -0.5),
        ("strict_format", "<think>a<think>b</think></think><answer>7</answer>", -0.5),
        ("strict_format", "<think>a</think><answer>7</answer><answer>7</answer>", -0.5),
        ("strict_format", "<answer>7</answer><think>a</think>", -0.5),
        ("strict_format", "", -0.5),
        ("step", "", 0.0),
        ("step", "Step 1: add", 1 / 3),
        ("step", "First, a. Then, b.", 2 / 3),
        ("step", "1. a\n2. b\n3. c\n4. d", 1.0),
        ("step", "- a\n* b", 2 / 3),
        ("step", "3.5 apples and a then b", 0.0),
        ("base_acc", GOOD, 1.0),
        ("base_acc", r"<think>\boxed{7}</think><answer>\boxed{8}</answer>", 0.0),
        ("base_acc", r"<think>\boxed{7}</think><answer>7</answer>", 0.0),
        ("base_acc", r"\boxed{7}", 0.0),
        ("math_17k_acc", r"\boxed{7}", 1.0),
        ("math_17k_acc", r"\boxed{14/2}", 1.0),
        ("math_17k_acc", r"\boxed{8}", 0.0),
        ("math_17k_acc", "7", 0.0),
        ("acc_for_ppo", r"\boxed{7}", 1.0),
        ("acc_for_ppo", r"\boxed{8}", 0.0),
        ("math_verify", r"The answer is $\frac{14}{2}$", 1.0),
        ("math_verify", r"\boxed{7}", 1.0),
        ("math_verify", "7", 1.0),
        ("math_verify", "The answer is 8", 0.0),
        ("math_verify", "", 0.0),
        ("math_verify", "no number at all", 0.0),
        ("acc_for_dapo", "so\nAnswer: 7", 1.0),
        ("acc_for_dapo", "answer : $7.0$.", 1.0),
        ("acc_for_dapo", r"**Answer: \boxed{7}**", 1.0),
        ("acc_for_dapo", "**Answer: 7**", 1.0),
        ("acc_for_dapo", "Answer: 8\nAnswer: 7", 1.0),
        ("acc_for_dapo", "Answer: 7\nAnswer: 8", -1.0),
        ("acc_for_dapo", "Answer: 7" + " " * 300, -1.0),
        ("acc_for_dapo", "Answer: seven", -1.0),
        ("acc_for_dapo", "7", -1.0),
        ("acc_for_dapo", "", -1.0),
    ],
)
def test_verifier(name, response, expected):
    assert score(name, response) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "expected"),
    [("7", 1.0), (" 7\n", 1.0), ("<answer>7</answer>", 1.0), ("3+4=7", 1 / 5), ("8", 0.0), ("", 0.0)],
)
def test_reasoning_gym(response, expected):
    task = {"dataset": "basic_arithmetic", "entry": {"answer": "7", "metadata": {}}}
    assert score("reasoning_gym", response, reasoning_gym=task) == pytest.approx(expected)


@pytest.mark.parametrize("extra", [{}, {"reasoning_gym": {"dataset": "basic_arithmetic"}}, {"reasoning_gym": "x"}])
def test_reasoning_gym_without_task(extra):
    with pytest.raises(ValueError, match="reasoning_gym"):
        score("reasoning_gym", "7", **extra)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="acc"):
        verifier("acc")(lambda sample: 0.0)


def test_child_side_imports_no_torch():
    code = (
        "import sys, mindspeed_rl.rewards.worker, math_verify; "
        "sys.exit(', '.join({'torch', 'ray', 'vllm'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_configuration_knows_the_same_names():
    assert {*VERIFIERS, "custom"} == set(rules.VERIFIERS)
