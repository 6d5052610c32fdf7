"""The command line up to the point where a run starts: exit codes, and what is not imported before."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from cli import train_dapo, train_dpo, train_ppo, train_sft
from cli.train_grpo import main
from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.compose import load_config

ROOT = Path(__file__).parents[2]
TINY = ["--config-name", "grpo_trainer_tiny_cpu"]

PROBE = """
import sys
from cli.train_grpo import main
code = main(sys.argv[1:])
heavy = {"torch", "ray", "vllm", "megatron", "transformers"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def probe(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_wrong_configuration_exits_with_2_before_anything_heavy_is_imported():
    result = probe(*TINY, "actor_config.lrr=1", "rl_config.mini_batch_size=5")
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "configuration errors:" in result.stderr
    assert "did you mean actor_config.lr?" in result.stderr
    assert "rl_config.mini_batch_size = 5" in result.stderr


def test_missing_files_stop_a_real_run(tmp_path):
    result = probe(*TINY, f"actor_config.load={tmp_path}/none")
    assert result.returncode == 2, result.stderr
    assert "actor_config.load" in result.stderr


def test_dry_run_of_the_7b_configuration_imports_nothing_heavy():
    result = probe("--config-name", "grpo_trainer_qwen25_7b", "--dry-run")
    assert result.returncode == 0, result.stderr
    for part in ("data parallel", "micro-batches", "GiB", "missing on this machine", "Configuration is valid"):
        assert part in result.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*po/*.yaml")), ids=lambda path: path.stem)
def test_dry_run_of_every_shipped_configuration(path, capsys):
    commands = {"dapo": train_dapo, "ppo": train_ppo, "sft": train_sft, "dpo": train_dpo}
    command = commands[path.parent.name].main if path.parent.name in commands else main
    assert command(["--config-name", path.stem, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "Memory per device" in output
    assert "Configuration is valid" in output


def test_a_dry_run_says_how_much_dynamic_sampling_may_generate(capsys):
    assert train_dapo.main(["--config-name", "dapo_trainer_tiny_cpu", "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "prompts generated at most" in line]
    assert "96" in line, "3 x 32"


def test_trace_is_a_switch_of_the_command_line(capsys):
    assert main([*TINY, "--trace", "--cfg", "job"]) == 0
    assert "trace: true" in capsys.readouterr().out.splitlines()
    assert main([*TINY, "--cfg", "job"]) == 0
    assert "trace: true" not in capsys.readouterr().out


def test_runs_as_a_file_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "cli" / "train_grpo.py"), *TINY, "--cfg", "job"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "tiny_qwen2" in result.stdout


def test_cfg_job_round_trips(tmp_path, capsys):
    assert main([*TINY, "--cfg", "job", "actor_config.lr=3e-4"]) == 0
    (tmp_path / "saved.yaml").write_text(capsys.readouterr().out)
    saved, _ = load_config("saved", config_dir=str(tmp_path))
    assert saved == load_config("grpo_trainer_tiny_cpu", ["actor_config.lr=3e-4"])[0]


def test_cfg_job_prints_even_what_is_wrong(capsys):
    assert main([*TINY, "--cfg", "job", "actor_config.lrr=1"]) == 2
    output = capsys.readouterr()
    assert "lrr: 1" in output.out
    assert "unknown key" in output.err


def test_overrides_may_stand_before_options(capsys):
    assert main(["actor_config.seed=5", *TINY, "--cfg", "job", "run_name=x"]) == 0
    assert "seed: 5" in capsys.readouterr().out


def test_dry_run_without_the_checkpoint_of_model_auto(capsys):
    assert main([*TINY, "--dry-run", "actor_config.model=auto", "actor_config.load=elsewhere"]) == 0
    assert "No memory estimate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "name", "stage", "right"),
    [
        (main, "dapo_trainer_tiny_cpu", "ray_dapo", "train_dapo"),
        (train_dapo.main, "grpo_trainer_tiny_cpu", "ray_grpo", "train_grpo"),
    ],
)
def test_a_configuration_is_for_one_command(command, name, stage, right, capsys):
    assert command(["--config-name", name, "--dry-run"]) == 2
    assert f"megatron_training.stage = '{stage}': is for cli/{right}.py" in capsys.readouterr().err
    other = {"ray_dapo": "ray_grpo", "ray_grpo": "ray_dapo"}[stage]
    assert command(["--config-name", name, "--dry-run", f"megatron_training.stage={other}"]) == 0


def test_the_name_of_a_configuration_is_required(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--dry-run"])
    assert caught.value.code == 2
    assert "--config-name" in capsys.readouterr().err


def test_errors_of_a_run_become_its_exit_code(monkeypatch, capsys):
    def fail(*_):
        raise DataError("no prompts in a.jsonl")

    monkeypatch.setattr("cli.train_grpo._run", fail)
    assert main(TINY) == 1
    assert capsys.readouterr().err == "no prompts in a.jsonl\n"


def test_documentation_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate_config_docs", ROOT / "ci" / "generate_config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.render(), "run python ci/generate_config_docs.py"
