"""Verifiers that hang, crash, raise or return nonsense: a status for the sample to blame, nothing for the others."""

import math
import multiprocessing
import time
from collections import Counter

import pytest

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.reward import CustomRewardConfig
from mindspeed_rl.config.schema import RLConfig
from mindspeed_rl.rewards.manager import RewardManager, RewardSample
from mindspeed_rl.rewards.worker import Status

MISBEHAVE = """
import os, re, signal, sys, time

class Odd(Exception):
    def __init__(self, a, b):  # does not survive pickling
        super().__init__(a)

def compute_score(prompt, response, label, **extra):
    if response == "hang": time.sleep(3600)
    if response == "c hang": re.match(r"(a+)+$", "a" * 40 + "b")
    if response == "slow": time.sleep(0.8)
    if response == "exit": os._exit(0 if extra.get("clean") else 3)
    if response == "sys.exit": sys.exit("bye")
    if response == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if response == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if response == "raise": raise Odd("broken", 2)
    if response == "modules": return float(bool({"torch", "ray", "pytest"} & set(sys.modules)))
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1", "true": True}.get(response, 0.5)

def weighted(prompt, response, label, weight=1.0):
    return weight * (response == label)

not_a_function = 3
"""


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    """Builds settings with the misbehaving verifier."""
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(MISBEHAVE)

    def build(name="compute_score", **settings) -> RLConfig:
        settings = {"verifier_function": ["custom"], "verifier_weight": [1.0], "verifier_timeout": 2.0, **settings}
        return RLConfig(custom_reward_function=CustomRewardConfig(path=str(path), name=name), **settings)

    return build


@pytest.fixture(scope="module")
def manager(custom):
    """One manager for many tests: it has to survive each of them."""
    with RewardManager(custom()) as manager:
        yield manager


def samples(*responses: str, **extra) -> list[RewardSample]:
    return [RewardSample("3+4=", response, "7", extra) for response in responses]


@pytest.mark.parametrize(
    ("response", "status", "message"),
    [
        ("hang", Status.TIMEOUT, "2 s"),
        ("c hang", Status.TIMEOUT, "2 s"),
        ("exit", Status.CRASHED, "3"),
        ("kill", Status.CRASHED, "-9"),
        ("segfault", Status.CRASHED, "-11"),
        ("sys.exit", Status.ERROR, "bye"),
        ("raise", Status.ERROR, "Odd: broken"),
        ("none", Status.ERROR, "None"),
        ("text", Status.ERROR, "'1'"),
        ("nan", Status.NAN, "nan"),
        ("inf", Status.NAN, "inf"),
    ],
)
def test_failure_is_a_status_of_its_own_sample(manager, response, status, message):
    begin = time.monotonic()
    result = manager.score(samples("a", "b", response, "c", "true", "d"))
    assert time.monotonic() - begin < 30  # two deadlines and two restarts, on a busy machine
    assert result.statuses["custom"] == [Status.OK] * 2 + [status] + [Status.OK] * 3
    assert message in result.messages["custom"][2]
    assert result.failed == [False, False, True, False, False, False]
    assert math.isnan(result.total[2])
    assert math.isnan(result.values["custom"][2])
    assert [value for value in result.total if not math.isnan(value)] == [0.5, 0.5, 0.5, 1.0, 0.5]
    metrics = result.metrics().finalize()
    assert metrics["custom_rewards/mean"] == pytest.approx(3.0 / 5)
    assert metrics["reward_failed_samples"] == 1
    for each in set(Status) - {Status.SKIPPED}:
        assert metrics[f"reward_status/{each.value}"] == (5 if each is Status.OK else each is status)


def test_metrics_of_the_first_samples_count_all_calls(manager):
    metrics = manager.score(samples("a", "nan", "true", "nan", "true")).metrics(3).finalize()
    assert metrics["custom_rewards/mean"] == pytest.approx(1.5 / 2)
    assert metrics["reward_failed_samples"] == 1
    assert metrics["reward_status/nan"] == 2
    assert metrics["reward_status/ok"] == 3


def test_a_reward_model_counts_like_a_verifier(custom):
    sources = {"code": {"reward_model": 3.0}, "math": {"custom": 1.0}}
    settings = {"reward_model_weight": 2.0, "reward_scale": 10.0, "source_verifier_weight": sources}
    with RewardManager(custom(**settings)) as manager:
        given = [RewardSample("", "a", "", source=source) for source in ("", "code", "math", "", "")]
        result = manager.score(given, [0.25, -1.0, 9.0, math.nan, math.inf])
        alone = manager.score(given)
    assert result.total[:3] == [10 * (0.5 + 2 * 0.25), 10 * 3 * -1.0, 10 * 0.5]
    assert result.failed == [False, False, False, True, True]
    assert result.statuses["reward_model"] == [Status.OK, Status.OK, Status.SKIPPED, Status.NAN, Status.NAN]
    assert "reward_config.max_length" in result.messages["reward_model"][3]
    metrics = result.metrics().finalize()
    assert metrics["reward_model_rewards/mean"] == pytest.approx((0.25 - 1) / 2)
    assert metrics["reward_model_rewards/nan"] == metrics["reward_failed_samples"] == 2
    # where it is not asked, as in validation, rules alone count
    assert alone.total == [5.0, 0.0, 5.0, 5.0, 5.0]
    assert set(alone.values) == {"custom"}


def test_a_reward_model_alone_needs_no_process():
    before = multiprocessing.active_children()
    with RewardManager(RLConfig(rule_reward=False, reward_model_weight=0.5)) as manager:
        assert manager.score(samples("a", "b"), [1.0, -4.0]).total == [0.5, -2.0]
        assert multiprocessing.active_children() == before


def test_everything_at_once_with_two_processes(custom):
    bad = ["hang", "exit", "kill", "raise", "nan", "exit", "kill"]
    with RewardManager(custom(verifier_parallel=2)) as manager:
        begin = time.monotonic()
        result = manager.score(samples(*bad, *["fine"] * 9))
        assert time.monotonic() - begin < 60
        expected = {Status.OK: 9, Status.TIMEOUT: 1, Status.CRASHED: 4, Status.ERROR: 1, Status.NAN: 1}
        assert Counter(result.statuses["custom"]) == expected
        assert manager.score(samples("fine")).total == [0.5]  # and it goes on working


def test_a_clean_exit_is_a_failure_too(manager):
    """A process that ends with code 0 looks healthy to a pool; the sample must still get a status."""
    result = manager.score(samples("fine", "exit", clean=True))
    assert result.total[0] == 0.5
    assert result.statuses["custom"][1] in (Status.CRASHED, Status.TIMEOUT)


def test_slow_samples_are_not_hanging_ones(manager):
    result = manager.score(samples(*["slow"] * 12))  # chunks of 2.4 s, with a deadline of 2 s
    assert result.statuses["custom"] == [Status.OK] * 12


def test_a_verifier_that_always_hangs_ends_with_the_call_deadline(custom):
    with RewardManager(custom(stage_timeout_minutes=0.3)) as manager:
        begin = time.monotonic()
        result = manager.score(samples(*["hang"] * 50))
        assert time.monotonic() - begin < 30  # 9 s and a restart; one by one they would take 100
        assert result.statuses["custom"] == [Status.TIMEOUT] * 50
        assert manager.score(samples("fine")).total == [0.5]


def test_close_kills_what_hangs(custom):
    before = set(multiprocessing.active_children())
    manager = RewardManager(custom(verifier_timeout=60))
    manager._pool.schedule(time.sleep, args=(3600,))
    time.sleep(0.3)
    begin = time.monotonic()
    manager.close()
    assert time.monotonic() - begin < 3
    assert set(multiprocessing.active_children()) <= before


def test_children_do_not_import_the_main_module_or_torch(manager):
    assert manager.score(samples("modules")).total == [0.0]


def test_weighted_sum_and_extra(custom):
    rl = custom("weighted", verifier_function=["acc", "custom"], verifier_weight=[1.0, 2.0])
    with RewardManager(rl) as manager:
        result = manager.score([*samples("7", weight=3.0), *samples("7")])
    assert result.values == {"acc": [-1.0, -1.0], "custom": [3.0, 1.0]}
    assert result.total == [5.0, 1.0]


def test_a_verifier_of_weight_zero_only_reports(custom):
    rl = custom(verifier_function=["format", "custom"], verifier_weight=[1.0, 0.0])
    with RewardManager(rl) as manager:
        result = manager.score(samples("nan", "<think>a</think><answer>b</answer>"))
    assert result.total == [0.0, 1.0]
    assert result.failed == [False, False]
    assert result.statuses["custom"][0] is Status.NAN


def test_unscorable_extra_is_an_error_of_its_sample(manager):
    unpicklable = RewardSample("", "x", "7", {"f": lambda: None})
    result = manager.score([*samples("a"), unpicklable])
    assert result.statuses["custom"] == [Status.OK, Status.ERROR]


def test_no_samples(manager):
    result = manager.score([])
    assert result.total == []
    assert "custom_rewards/mean" not in result.metrics().finalize()


def test_cheap_verifiers_are_cheap():
    with RewardManager(RLConfig(verifier_function=["acc"], verifier_weight=[1.0])) as manager:
        batch = [RewardSample("", rf"so \boxed{{{n}}}", "7") for n in range(512)]
        manager.score(batch)
        seconds = []
        for _ in range(5):
            begin = time.monotonic()
            result = manager.score(batch)
            seconds.append(time.monotonic() - begin)
    assert result.total.count(1.0) == 1
    assert min(seconds) < 0.2


@pytest.mark.parametrize(
    ("name", "expected"),
    [("absent", "has no function 'absent'"), ("not_a_function", "not a function")],
)
def test_custom_function_missing(custom, name, expected):
    with pytest.raises(ConfigError, match=expected):
        RewardManager(custom(name))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(1)", "died"),
    ],
)
def test_custom_file_that_does_not_load(tmp_path, source, expected):
    path = tmp_path / "broken.py"
    path.write_text(source)
    rl = RLConfig(verifier_function=["custom"], custom_reward_function=CustomRewardConfig(path=str(path)))
    with pytest.raises(ConfigError, match=expected):
        RewardManager(rl)


def test_rows_of_a_source_have_weights_of_their_own():
    rl = RLConfig(
        verifier_function=["acc", "format", "base_acc"],
        verifier_weight=[1.0, 0.5, 0.25],
        source_verifier_weight={"sums": {"acc": 2.0}, "logic": {"format": 1.0, "acc": 0.0}},
        reward_scale=5.0,
    )
    right = r"<think>x</think> <answer>\boxed{7}</answer>"
    given = [RewardSample("3+4=", right, "7", {}, source) for source in ("other", "sums", "logic")]
    given.append(RewardSample("3+4=", r"\boxed{8}", "7", {}, "sums"))
    with RewardManager(rl) as manager:
        result = manager.score(given)
    # acc 1 or -0.5, format and base_acc 1
    assert result.total == [5 * (1.0 + 0.5 + 0.25), 5 * 2.0, 5 * 1.0, 5 * 2.0 * -0.5]
    assert not any(result.failed)
    skipped = {name: [status is Status.SKIPPED for status in column] for name, column in result.statuses.items()}
    assert skipped == {
        "acc": [False] * 4,
        "format": [False, True, False, True],
        "base_acc": [False, True, True, True],
    }
    assert result.messages == {"acc": {}, "format": {}, "base_acc": {}}
    metrics = result.metrics().finalize()
    assert metrics["format_rewards/mean"] == 1  # over the two that were asked about
    assert metrics["reward_status/skipped"] == 5
    assert metrics["acc_rewards/mean"] == pytest.approx((1 + 1 + 1 - 0.5) / 4)


def test_nothing_is_said_of_skipping_where_nothing_is_skipped(manager):
    assert "reward_status/skipped" not in manager.score(samples("a")).metrics().finalize()
