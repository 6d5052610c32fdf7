"""Generated tasks, from the command line to the reward of their own answers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.make_data import main
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.data.prompts import load_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.rewards.manager import RewardManager
from mindspeed_rl.rewards.verifiers import RewardSample

ROOT = Path(__file__).resolve().parents[2]
ADDITION = [
    *("--task", "basic_arithmetic", "--size", "4000", "--seed", "0"),
    *("--config", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1", "operators=[+]"),
    "allow_parentheses=false",
    *("--prompt-template", "{expression}=", "--strip-spaces", "--answer-pattern", r"^\d$", "--dedupe"),
]


def test_tiny_addition_end_to_end(tmp_path, tiny_model_dir):
    file = tmp_path / "made" / "addition.jsonl"
    assert main([*ADDITION, "--output", str(file)]) == 0
    actor = MegatronConfig(data_path=str(file))
    data = load_prompts(actor, RLConfig(max_prompt_length=4), load_tokenizer(tiny_model_dir))
    expected = {f"{a}+{b}=": str(a + b) for a in range(10) for b in range(10) if a + b <= 9}
    assert {sample.prompt_text: sample.label for sample in data.samples} == expected
    assert len(data) == 55
    assert data.dropped_too_long == 0
    right = [RewardSample(s.prompt_text, s.label, s.label, s.extra) for s in data.samples]
    wrong = [RewardSample(s.prompt_text, "-", s.label, s.extra) for s in data.samples]
    with RewardManager(RLConfig(verifier_function=["reasoning_gym"], verifier_weight=[1.0])) as manager:
        result = manager.score(right + wrong)
    assert result.total == [1.0] * 55 + [0.0] * 55


def test_as_a_command_twice_the_same(tmp_path):
    for name in ("a", "b"):
        command = [sys.executable, str(ROOT / "cli" / "make_data.py"), "--task", "chain_sum", "--size", "20"]
        done = subprocess.run(
            [*command, "--output", name + ".jsonl"], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        assert done.stdout == f"{name}.jsonl: 20 rows\n"
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    row = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    assert row["data_source"] == "chain_sum"
    assert row["extra"]["reasoning_gym"]["entry"]["answer"] == row["answer"]


@pytest.mark.parametrize("task", ["gcd", "countdown", "spell_backward", "simple_equations"])
def test_other_tasks_score_their_own_answers(tmp_path, task):
    file = tmp_path / "a.jsonl"
    assert main(["--task", task, "--size", "5", "--output", str(file)]) == 0
    assert len(file.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--task", "chain_sums"], "'chain_sums'.*did you mean chain_sum"),
        (["--task", "chain_sum", "--config", "digits=3"], "'digits'.*min_digits"),
        (["--task", "chain_sum", "--config", "size=3"], "'size=3': is no setting of a task, write --size 3"),
        (["--task", "chain_sum", "--size", "0"], "size = 0: must be 1 or more"),
        (["--task", "chain_sum", "--prompt-template", "{question"], "template '{question': expected '}'"),
        (
            ["--task", "chain_sum", "--prompt-template", "{question:d}"],
            "template '{question:d}': Unknown format code",
        ),
        (["--task", "chain_sum", "--prompt-template", "{question:{x}}"], "template '{question:{x}}': 'x'"),
        (["--task", "chain_sum", "--config", "digits"], "must be key=value"),
        (["--task", "chain_sum", "--config", "min_digits=0"], "refuses"),
        (["--task", "chain_sum", "--config", "min_digits=[1"], "not valid YAML"),
        (["--task", "chain_sum", "--prompt-template", "{expr}="], "no 'expr', there are"),
        (["--task", "chain_sum", "--answer-pattern", "("], "answer pattern"),
        (["--task", "chain_sum", "--answer-pattern", "x"], "none of 1000 entries is left"),
        (["--task", "propositional_logic", "--size", "3"], "own answer not worth 1.0"),
    ],
)
def test_refused(tmp_path, capsys, arguments, expected):
    file = tmp_path / "a.jsonl"
    assert main([*arguments, "--output", str(file)]) == 1
    error = capsys.readouterr().err
    assert re.search(expected, error)
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["folder", "file/rows.jsonl"])
def test_an_output_that_cannot_be_written(tmp_path, capsys, output):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert main(["--task", "chain_sum", "--size", "2", "--output", str(tmp_path / output)]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / output.partition("/")[0]) in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
