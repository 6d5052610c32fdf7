"""How a process is prepared for Megatron. MindSpeed is a module that writes down what a real one would be told."""

import json
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.config.environment import TRAINERS
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.base import Device
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.device.cuda import CudaDevice
from mindspeed_rl.device.npu import NpuDevice
from mindspeed_rl.engine.megatron.bootstrap import mindspeed_arguments

DECLARED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("mindspeed").joinpath("arguments.json").read_text()
)
MEGATRONS = {"--position-embedding-type": "rope"}  # MindSpeed's fused rotary embedding asks for this one
ALWAYS = ["--optimizer-selection", "fused_adamw", "--context-parallel-algo", "ulysses_cp_algo"]
ROTARY = ["--use-fused-rotary-pos-emb", "--position-embedding-type", "rope"]


def options(arguments: list[str]) -> dict[str, list[str]]:
    """Each option with the values that follow it."""
    return {
        option: list(takewhile(lambda word: not word.startswith("--"), arguments[place + 1 :]))
        for place, option in enumerate(arguments)
        if option.startswith("--")
    }


@pytest.mark.parametrize(
    ("keys", "forwarded"),
    [
        ({}, ["--use-fused-rmsnorm", "--use-fused-swiglu", *ROTARY]),
        ({"use_flash_attn": True}, ["--use-fused-rmsnorm", "--use-fused-swiglu", *ROTARY]),
        ({"use_fused_rmsnorm": False}, ["--use-fused-swiglu", *ROTARY]),
        ({"use_fused_swiglu": False}, ["--use-fused-rmsnorm", *ROTARY]),
        ({"use_fused_rotary_pos_emb": False}, ["--use-fused-rmsnorm", "--use-fused-swiglu"]),
        (
            {"recompute_activation_function": True},
            ["--use-fused-rmsnorm", "--use-fused-swiglu", *ROTARY, "--recompute-activation-function"],
        ),
    ],
    ids=str,
)
def test_keys_become_arguments(keys: dict[str, bool], forwarded: list[str]) -> None:
    assert mindspeed_arguments(MegatronConfig(**keys)) == [*ALWAYS, *forwarded]


def test_every_argument_is_one_that_mindspeed_declares() -> None:
    everything = options(mindspeed_arguments(MegatronConfig(recompute_activation_function=True)))
    assert len(everything) == 7
    for option, values in everything.items():
        if option in MEGATRONS:
            assert values == [MEGATRONS[option]]
            assert option not in DECLARED
            continue
        declared = DECLARED[option]
        if declared.get("action") == "store_true":
            assert values == []
        else:
            assert (declared["type"], len(values)) == ("str", 1)
            assert values[0] in declared["choices"]


def test_every_named_feature_is_one_that_mindspeed_declares() -> None:
    """Those that are refused, too: a name that MindSpeed does not know would be refused for the wrong reason."""
    names = ("reuse_fp32_param", "swap_optimizer", "swap_attention", "moe_tp_extend_ep", "npu_deterministic")
    assert {DECLARED[f"--{name.replace('_', '-')}"]["action"] for name in names} == {"store_true"}
    ours = MegatronConfig.model_json_schema()["properties"]["context_parallel_algo"]["enum"]
    assert set(ours) <= set(DECLARED["--context-parallel-algo"]["choices"])


# Stands for MindSpeed, and does as its adaptor does: reads the command line when imported, and imports Megatron then
ADAPTOR = """\
import json, sys
from pathlib import Path
assert not any(name.startswith("megatron.") for name in sys.modules)
assert "torch_npu" in sys.modules and "torch" in sys.modules
Path(__file__).with_name("told.json").write_text(json.dumps(sys.argv))
"""
TORCH_NPU = "import types, torch\ntorch.npu = types.SimpleNamespace()\n"
PREPARE = """\
import sys
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.device.npu import NpuDevice
from mindspeed_rl.engine.megatron.bootstrap import prepare
"""


@pytest.fixture
def npu_packages(tmp_path: Path) -> Path:
    (tmp_path / "torch_npu.py").write_text(TORCH_NPU)
    mindspeed = tmp_path / "mindspeed"
    mindspeed.mkdir()
    (mindspeed / "__init__.py").touch()
    (mindspeed / "megatron_adaptor.py").write_text(ADAPTOR)
    return tmp_path


def run(packages: Path, code: str) -> str:
    """The last line that a fresh process prints, or the last of its error."""
    program = f"import sys\nsys.path.insert(0, {str(packages)!r})\n{PREPARE}{code}"
    done = subprocess.run(
        [sys.executable, "-c", program, "the trainer's", "--own-arguments"], capture_output=True, text=True
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def test_mindspeed_is_told_before_megatron_is_there_and_the_command_line_comes_back(npu_packages: Path) -> None:
    code = "prepare(NpuDevice(), MegatronConfig(use_fused_swiglu=False))\n" * 2 + "print(sys.argv)"
    assert run(npu_packages, code) == str(["-c", "the trainer's", "--own-arguments"])
    told = json.loads((npu_packages / "mindspeed" / "told.json").read_text())
    assert told == ["-c", *ALWAYS, "--use-fused-rmsnorm", *ROTARY]


def test_a_process_is_prepared_in_one_way(npu_packages: Path) -> None:
    code = "prepare(NpuDevice(), MegatronConfig())\nprepare(NpuDevice(), MegatronConfig(use_fused_swiglu=False))"
    found = run(npu_packages, code)
    assert "SetupError: this process is prepared for Megatron as ('npu', " in found
    assert "and cannot be prepared as ('npu', " in found


@pytest.mark.parametrize("kind", ["Npu", "Cpu"])
def test_megatron_before_that_is_refused(npu_packages: Path, kind: str) -> None:
    imports = f"import megatron.core.enums\nfrom mindspeed_rl.device.{kind.lower()} import {kind}Device\n"
    found = run(npu_packages, f"{imports}prepare({kind}Device(), MegatronConfig())")
    assert (
        f"SetupError: megatron was imported before this process was prepared for device = '{kind.lower()}'" in found
    )
    assert "modules: megatron.core and " in found
    assert "Call mindspeed_rl.engine.megatron.bootstrap.prepare first" in found
    assert not (npu_packages / "mindspeed" / "told.json").exists()


def test_without_mindspeed_there_is_no_npu(npu_packages: Path) -> None:
    (npu_packages / "mindspeed").rename(npu_packages / "elsewhere")
    found = run(npu_packages, "prepare(NpuDevice(), MegatronConfig())")
    assert "device = 'npu': package mindspeed is not installed (install it from its source" in found


def test_a_mindspeed_that_does_not_fit_is_named(npu_packages: Path) -> None:
    (npu_packages / "mindspeed" / "megatron_adaptor.py").write_text("import megatron.core.not_in_this_version\n")
    found = run(npu_packages, "prepare(NpuDevice(), MegatronConfig())")
    assert "SetupError: MindSpeed cannot be applied to Megatron: No module named 'megatron.core.not_in_" in found
    assert "requirements/npu.txt names versions" in found


def test_recomputation_by_mindspeed_needs_megatrons_source(npu_packages: Path) -> None:
    code = "prepare(NpuDevice(), MegatronConfig(recompute_activation_function=True))\nprint('prepared')"
    found = run(npu_packages, code)
    assert "recompute_activation_function = True: MindSpeed imports megatron.training for it" in found
    assert "put Megatron-LM's source" in found
    training = npu_packages / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").touch()
    assert run(npu_packages, code) == "prepared"


@pytest.mark.parametrize("device", [NpuDevice(), CudaDevice(), CpuDevice()], ids=lambda device: device.name)
def test_what_devices_set_is_known_to_be_the_trainers(device: Device) -> None:
    names = {*device.worker_environment(1), *device.vllm_environment(1, eager=False)}
    assert names - {"OMP_NUM_THREADS", "VLLM_MLA_DISABLE"} <= set(TRAINERS)  # these two are the user's elsewhere
