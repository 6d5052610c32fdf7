"""Responses in files: numbers against a count by hand, and files that cannot be used."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from cli.evaluate import main

COMMAND = [
    "--config-name=grpo_trainer_tiny_cpu",
    "rl_config.verifier_function=[acc]",
    "megatron_training.answer_key=reward_model.ground_truth",
]
PROMPTS = 20


def write_responses(file: Path) -> None:
    """20 prompts of two sources, two responses each: of `sums` the first 6 have both right, of `products` 3 one.

    Without a box (-1 instead of -0.5) are the second responses of products 7 to 9.
    """
    rows = []
    for number in range(PROMPTS):
        source, index = ("sums", number) if number < 10 else ("products", number - 10)
        right, wrong, nothing = rf"\boxed{{{number}}}", r"\boxed{-1}", "no idea"
        if source == "sums":
            responses = [right, right] if index < 6 else [wrong, wrong]
        else:
            responses = [wrong, right] if index < 3 else [wrong, nothing if index >= 7 else wrong]
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"question {number}"}],
                "responses": responses,
                "data_source": source,
                "reward_model": {"style": "rule", "ground_truth": str(number)},
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def test_numbers_are_those_of_a_count_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_responses(tmp_path / "responses.parquet")
    assert (
        main([*COMMAND, "--responses", str(tmp_path / "responses.parquet"), "--output", str(tmp_path / "out")]) == 0
    )
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    # right 1, wrong -0.5, no box -1
    assert found["sums/acc/mean"] == pytest.approx((12 * 1 - 8 * 0.5) / 20)
    assert found["products/acc/mean"] == pytest.approx((3 * 1 - 14 * 0.5 - 3 * 1) / 20)
    assert found["all/acc/mean"] == pytest.approx((15 - 22 * 0.5 - 3) / 40)
    assert found["sums/pass@1"] == found["sums/pass@2"] == pytest.approx(6 / 10)
    assert found["products/pass@1"] == pytest.approx(3 / 20)
    assert found["products/pass@2"] == pytest.approx(3 / 10)
    assert found["all/pass@2"] == pytest.approx(9 / 20)
    assert found["sums/maj@2"] == pytest.approx(6 / 10)
    assert found["products/maj@2"] == 0  # the wrong one comes first
    assert found["all/failed"] == 0
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "responses.parquet").to_pylist()
    assert len(rows) == 40
    assert rows[0]["prompt"] == "question 0"
    assert [row["acc"] for row in rows[:2]] == [1, 1]
    printed = capsys.readouterr().out
    assert "products" in printed
    assert "pass@2" in printed


def test_sources_may_hold_slashes_and_differ_in_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A verifier decides, though nothing of the configuration says what to validate on."""
    file = tmp_path / "two files = one.jsonl"
    right, wrong = r"\boxed{1}", r"\boxed{2}"
    rows = [
        {"prompt": "q", "answer": "1", "data_source": "openai/gsm8k", "responses": [right, wrong, right]},
        {"prompt": "q", "answer": "1", "data_source": "lighteval/MATH", "responses": [wrong, right]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "--config-name=grpo_trainer_tiny_cpu",
        "rl_config.verifier_function=[acc]",
        "rl_config.val_metric=acc",
    ]
    assert main([*arguments, f"--responses={file}", f"--output={tmp_path}/out"]) == 0
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert found["openai/gsm8k/pass@1"] == pytest.approx(2 / 3)
    assert (found["openai/gsm8k/maj@3"], found["lighteval/MATH/maj@2"]) == (1, 0)
    assert found["all/pass@1"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    table = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert list(table) == ["lighteval/MATH", "openai/gsm8k", "all"]


def test_a_preview_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config-name=grpo_trainer_tiny_cpu", "megatron_training.val_data_path=none.jsonl"]
    assert main([*arguments, "--cfg=job"]) == 0
    assert "val_data_path: none.jsonl" in capsys.readouterr().out
    assert main([*arguments, "--dry-run"]) == 0
    assert "Configuration is valid" in capsys.readouterr().out
    assert main(["--config-name=grpo_trainer_tiny_cpu", "--dry-run"]) == 2
    assert "megatron_training.val_data_path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "arguments", "code", "message"),
    [
        ({"prompt": "1", "responses": [3]}, [], 1, "--response-key = 'responses': must be text or a list of texts"),
        ({"prompt": "1", "response": "a"}, [], 1, "no such column, there are ['prompt', 'response'"),
        (
            {"prompt": "1", "response": "a"},
            ["--response-key=response"],
            1,
            "answer_key = 'reward_model.ground_truth'",
        ),
        ({"prompt": 1, "responses": "a"}, [], 1, "prompt_key = 'prompt': must be text or a list of messages, is 1"),
        ({"prompt": "1"}, ["rl_config.val_metric=accc"], 2, "rl_config.val_metric = 'accc'"),
        ({"prompt": "1"}, ["rl_config.verifier_function=[ac]"], 2, "rl_config.verifier_function"),
    ],
)
def test_what_cannot_be_evaluated_is_named(
    row: dict, arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert main([*COMMAND, f"--responses={file}", *arguments]) == code
    assert message in capsys.readouterr().err


def test_an_empty_file_and_a_missing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").write_text("")
    assert main([*COMMAND, f"--responses={tmp_path}/none.jsonl"]) == 1
    assert "there are no rows" in capsys.readouterr().err
    assert main([*COMMAND, f"--responses={tmp_path}/nowhere.jsonl"]) == 1
    assert f"--responses = '{tmp_path}/nowhere.jsonl': no such file" in capsys.readouterr().err
