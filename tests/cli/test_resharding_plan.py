"""The command that shows an export's plan."""

import pytest

from cli.resharding_plan import main


def test_it_shows_the_ranks_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config-name=grpo_trainer_qwen3_30b_a3b_h200", "--rank=0", "--rank=7"]
    assert main([*arguments, "generate_config.resharding_bucket_mb=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("rank")]
    assert [head.split(" (")[0] for head in heads] == ["rank 0 of 8", "rank 7 of 8"]
    assert "buckets up to 64.0 MiB" in "\n".join(lines)


@pytest.mark.parametrize("rank", ["-1", "2"])
def test_a_rank_that_is_not_there_is_refused(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name=grpo_trainer_tiny_cpu", f"--rank={rank}"]) == 2
    assert f"--rank = {rank}: is no training rank" in capsys.readouterr().err


def test_a_wrong_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name=grpo_trainer_tiny_cpu", "generate_config.resharding_bucket_mb=0"]) == 2
    assert "resharding_bucket_mb" in capsys.readouterr().err
