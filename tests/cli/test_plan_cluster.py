"""The fastest layouts: all are valid, none that fits is faster, and mistakes are named."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from cli.plan_cluster import main
from mindspeed_rl.config.compose import compose_yaml, validate
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.planner.search import _uneven

NAME = "grpo_trainer_qwen25_7b"


def plan(*arguments: str, name: str = NAME) -> int:
    return main(["--config-name", name, *arguments])


@pytest.mark.parametrize("staleness", [[], ["--staleness", "1"]])
def test_every_layout_shown_passes_the_rules(staleness: list[str], tmp_path: Path, capsys) -> None:
    file = tmp_path / "plans.json"
    assert plan("--cluster", "ascend_910b", "--devices", "16", "--json", str(file), *staleness) == 0
    printed = capsys.readouterr().out
    plans = json.loads(file.read_text())
    totals = [each["seconds"]["total"] for each in plans]
    assert totals == sorted(totals)
    assert f"{totals[0]:,.1f}" in printed
    base = OmegaConf.to_container(OmegaConf.create(compose_yaml(NAME)))
    for path in plans[0]["without"]:
        section, _, key = path.rpartition(".")
        base.get(section, {}).pop(key, None)
    for each in plans:
        cfg = validate(OmegaConf.to_container(OmegaConf.merge(base, each["configuration"])))
        layout = derive_layout(cfg)
        assert layout.devices == 16
        assert layout.integrated != bool(staleness)
        tokens = layout.sequences_per_iteration * (512 + 1536)
        rate = tokens / each["seconds"]["total"] / 16
        assert each["tokens_per_second_per_device"] == pytest.approx(rate, rel=1e-3)


def test_what_is_printed_can_be_merged(tmp_path: Path, capsys) -> None:
    file = tmp_path / "plans.json"
    assert plan("--cluster", "h200", "--devices", "8", "--json", str(file)) == 0
    text = capsys.readouterr().out.split(":\n\n", 1)[1]
    assert yaml.safe_load(text) == json.loads(file.read_text())[0]["configuration"]


def test_less_memory_is_slower_or_does_not_fit(tmp_path: Path) -> None:
    fastest = []
    for memory in (139, 40):
        file = tmp_path / f"{memory}.json"
        cluster = tmp_path / f"{memory}.yaml"
        text = Path("configs/cluster/h200.yaml").read_text().replace("memory_gib: 139", f"memory_gib: {memory}")
        cluster.write_text(text)
        assert plan("--cluster", str(cluster), "--devices", "8", "--json", str(file)) == 0
        fastest.append(json.loads(file.read_text())[0]["seconds"]["total"])
    assert fastest[0] < fastest[1]


def test_layers_that_do_not_divide_get_a_list() -> None:
    assert _uneven(28, 4) is None
    assert _uneven(94, 4) == "23,24,24,23"
    assert _uneven(7, 1) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "h201", "--devices", "8"], "--cluster = 'h201': no such type of cluster (did you mean h200?)"),
        (["--cluster", "h200", "--devices", "12"], "--devices = 12: is no multiple of the 8 devices of a node"),
        (["--cluster", "h200", "--devices", "0"], "--devices = 0: must be 1 or more"),
        (["--cluster", "h200", "--devices", "1", "--staleness", "1"], "--devices = 1: must be 2 or more"),
        (
            ["--cluster", "h200", "--devices", "8", "--response-tokens", "9999"],
            "between 1 and the longest, 3072",
        ),
        (["--cluster", "h200", "--devices", "8", "rl_config.n_samples_per_prompts=4"], "n_samples_per_prompts"),
        (["--cluster", "h200", "--devices", "8", "rl_config.mini_batch_size=7"], "rl_config.mini_batch_size = 7"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys) -> None:
    assert plan(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_fits_nowhere_is_refused(capsys) -> None:
    assert plan("--cluster", "ascend_910b", "--devices", "8", name="grpo_trainer_deepseekv3_671b") == 2
    assert "--devices = 8: of 61 GiB cannot hold the weights" in capsys.readouterr().err


def test_a_cluster_file_says_all_it_must(tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("device: cuda\ntflops: -1\n")
    assert plan("--cluster", str(file), "--devices", "8") == 2
    errors = capsys.readouterr().err
    assert "tflops = -1" in errors
    assert "memory_gib" in errors


def test_no_tokens_are_no_default(capsys) -> None:
    assert plan("--cluster", "h200", "--devices", "8", "--prompt-tokens", "0") == 2
    assert "--prompt-tokens = 0.0: must be between 1 and the longest" in capsys.readouterr().err
