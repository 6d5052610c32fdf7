"""Validation in whole runs: it says what it should, and training does not notice."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.support.runs import command, make_inputs, run, training

SEPARATE = (
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource={num_npus: 1}",
    "rl_config.actor_resource.num_npus=1",
    "generate_config.per_request_seed=false",
    "generate_config.sampling_config.ignore_eos=true",  # in training alone
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    rows = [
        {"prompt": f"{a}+5=", "answer": str(a + 5), "data_source": "small" if a < 2 else "large"} for a in range(5)
    ]
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def validated(inputs: Path, *more: str) -> list[str]:
    return [
        f"megatron_training.val_data_path={inputs}/val.jsonl",
        "rl_config.test_freq=2",
        "rl_config.val_before_train=true",
        "rl_config.log_val_generations=3",
        "generate_config.val_sampling_config.n=2",
        "generate_config.val_sampling_config.temperature=0.7",
        "generate_config.val_sampling_config.max_tokens=3",
        *more,
    ]


def validations(steps: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    found = {step["step"]: {k: v for k, v in step.items() if k.startswith("val/")} for step in steps}
    return {step: metrics for step, metrics in found.items() if metrics}


@pytest.mark.parametrize("layout", [(), SEPARATE], ids=["integrated", "separate"])
def test_training_does_not_notice(inputs: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    iterations = "megatron_training.train_iters=3"
    plain = run(inputs, tmp_path, iterations, *layout, name="plain")
    watched = run(inputs, tmp_path, iterations, *layout, *validated(inputs), name="watched")
    assert watched[0]["step"] == 0
    assert [training(step) for step in watched[1:]] == [training(step) for step in plain]
    if layout:
        assert all(step["response_length/min"] == step["response_length/max"] == 3 for step in plain)
    found = validations(watched)
    assert set(found) == {0, 2, 3}  # before, every second, and the last
    for metrics in found.values():
        assert {name.split("/")[1] for name in metrics} == {"small", "large", "all"}
        counts = {"small": 2, "large": 3}
        mean = sum(metrics[f"val/{source}/reward/mean"] * count for source, count in counts.items()) / 5
        assert metrics["val/all/reward/mean"] == pytest.approx(mean)
        assert 1 <= metrics["val/all/response_length/mean"] <= 3
        assert metrics["val/all/pass@2"] >= metrics["val/all/pass@1"]
    samples = [json.loads(line) for line in (tmp_path / "watched" / "val_samples.jsonl").read_text().splitlines()]
    shown = [sample for sample in samples if sample["step"] == 0]
    assert [sample["prompt"] for sample in shown] == ["0+5=", "0+5=", "1+5="]


def test_a_model_is_evaluated_as_before_training(inputs: Path, tmp_path: Path) -> None:
    from tests.support.forked import run_forked

    watched = run(inputs, tmp_path, "megatron_training.train_iters=1", *validated(inputs), name="watched")
    _, _, *arguments = command(inputs, tmp_path, *validated(inputs), "run_name=evaluated")
    said = tmp_path / "evaluated.txt"
    assert run_forked("evaluate", [*arguments, f"--output={tmp_path}/out"], said) == 0, said.read_text()[-3000:]
    assert "prompts to validate on: 5; dropped as longer than" in said.read_text()
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {f"val/{name}": value for name, value in found.items()} == validations(watched)[0]
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "responses.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == [f"{a}+5=" for a in range(5) for _ in range(2)]
