"""Responses that go on over iterations, in the whole trainer: real engine, checkpoint, restart."""

from pathlib import Path

import pytest

from cli.train_grpo import main
from tests.support.runs import command, run, training

LONG = (
    "generate_config.infer_tensor_parallel_size=2",
    "rl_config.shuffle_mini_batch=true",
    "rl_config.partial_rollout_max_split=3",
    "rl_config.partial_rollout_threshold=0.6",
    "generate_config.max_model_len=32",
    "generate_config.sampling_config.max_tokens=16",
    "megatron_training.seq_length=32",
    "megatron_training.train_iters=4",
)


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory):
    """Folder and metrics of a run that was not interrupted, with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("partial")
    return folder, run(inputs, folder, *LONG, "megatron_training.save_interval=2")


def test_tokens_of_older_policies_are_trained_on_with_the_log_probs_they_were_drawn_with(whole):
    first, *later = whole[1]
    assert first["rollout/logprob_diff_max"] < 1e-5, "nothing is older than the policy in the first iteration"
    assert any(step["rollout/logprob_diff_max"] > 1e-3 for step in later)
    assert first["staleness/max"] == 0
    assert first["rollout/is_weight"] == 1
    assert any(abs(step["rollout/is_weight"] - 1) > 1e-3 for step in later), "older tokens are weighted"
    assert max(step["staleness/max"] for step in later) in (1, 2), "three iterations at most"


def test_a_resumed_run_goes_on_with_unfinished_responses(inputs: Path, tmp_path: Path, whole):
    checkpoint = whole[0] / "checkpoints" / "iter_0000002"
    assert (checkpoint / "dock.pkl").is_file()
    resumed = run(inputs, tmp_path, *LONG, f"actor_config.load={checkpoint}")
    assert [training(step) for step in resumed] == [training(step) for step in whole[1][2:]]


def test_another_layout_goes_on_with_unfinished_responses(inputs: Path, tmp_path: Path, whole):
    """What one rollout replica has and has not finished is shared out to two; training goes from DP to TP."""
    changed = ("generate_config.infer_tensor_parallel_size=1", "actor_config.tensor_model_parallel_size=2")
    checkpoint = whole[0] / "checkpoints" / "iter_0000002"
    resumed = run(inputs, tmp_path, *LONG, *changed, f"actor_config.load={checkpoint}")
    assert [step["step"] for step in resumed] == [3, 4]
    assert resumed[0]["staleness/max"] in (1, 2), "tokens of policies from before the restart are trained on"
    assert all(step["reward_status/ok"] == 32 for step in resumed)


def test_unfinished_responses_need_iterations_of_their_size(inputs: Path, tmp_path: Path, whole, capsys):
    checkpoint = whole[0] / "checkpoints" / "iter_0000002"
    settings = [
        *LONG,
        f"actor_config.load={checkpoint}",
        "rl_config.partial_rollout_threshold=0.8",
        "rl_config.mini_batch_size=8",
    ]
    assert main(command(inputs, tmp_path, *settings)[2:]) == 2
    message = capsys.readouterr().err
    assert "rl_config.partial_rollout_threshold = 0.8: was 0.6 in the run that is resumed" in message
    assert "rl_config.mini_batch_size = 8: was 4" in message
