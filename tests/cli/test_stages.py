"""Commands that are not for a configuration's stage say so."""

import pytest

from cli import evaluate, resharding_plan, train_dpo, train_grpo, train_sft


@pytest.mark.parametrize(
    ("main", "name", "message"),
    [
        (train_grpo.main, "sft_tiny_cpu", "is for cli/train_sft.py, not for cli/train_grpo.py"),
        (train_sft.main, "dpo_tiny_cpu", "is for cli/train_dpo.py, not for cli/train_sft.py"),
        (train_dpo.main, "grpo_trainer_tiny_cpu", "is for cli/train_grpo.py, not for cli/train_dpo.py"),
        (resharding_plan.main, "sft_tiny_cpu", "has no rollout, which resharding is about"),
    ],
)
def test_refused(main, name, message, capsys):
    extra = [] if main is resharding_plan.main else ["--dry-run"]
    assert main([f"--config-name={name}", *extra]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_generated_by_a_stage_without_rollout(tmp_path, capsys):
    (tmp_path / "responses.jsonl").write_text('{"prompt": "1", "answer": "1", "responses": "1"}\n')
    arguments = ["--config-name=sft_tiny_cpu", f"--responses={tmp_path}/responses.jsonl"]
    assert evaluate.main(arguments) == 2
    assert "has no rollout, which cli/evaluate.py is about" in capsys.readouterr().err


@pytest.mark.parametrize(("main", "name"), [(train_sft.main, "sft_tiny_cpu"), (train_dpo.main, "dpo_qwen25_7b")])
def test_a_dry_run_tells_of_the_step_and_not_of_rollout(main, name, capsys):
    assert main([f"--config-name={name}", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "One optimizer step" in said
    assert "Configuration is valid." in said
    for word in ("rollout", "KV cache", "prompts", "resharding"):
        assert word not in said
