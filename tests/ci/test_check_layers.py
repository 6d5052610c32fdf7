"""The layer check catches each kind of violation in a made-up tree, and passes what is allowed."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "ci" / "check_layers.py"


def check(root: Path, files: dict[str, str]) -> tuple[int, str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


VIOLATIONS = {
    "upward": ("config/a.py", "import os\nfrom mindspeed_rl.device.base import Device\n", 2, "a layer above it"),
    "upward in a function": ("data/a.py", "def f():\n    import mindspeed_rl.trainer.x\n", 2, "a layer above it"),
    "upward for types only": (
        "common/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mindspeed_rl.config.schema import Config\n",
        3,
        "a layer above it",
    ),
    "upward relative": ("device/a.py", "from ..workers import group\n", 1, "a layer above it"),
    "upward from the package": ("metrics/a.py", "from mindspeed_rl import trainer\n", 1, "a layer above it"),
    "upward by name": (
        "types.py",
        "import importlib\nlazy = lambda: importlib.import_module('mindspeed_rl.device.cpu')\n",
        2,
        "a layer above it",
    ),
    "sideways": ("rewards/a.py", "\nfrom mindspeed_rl.metrics.names import N\n", 2, "neighbour on the same layer"),
    "sideways checkpoint": ("checkpoint/a.py", "import mindspeed_rl.resharding.names\n", 1, "neighbour"),
    "engine to engine": (
        "engine/vllm/a.py",
        "def f():\n    import mindspeed_rl.engine.megatron.model\n",
        2,
        "neighbour",
    ),
    "engine base to engine": ("engine/base.py", "import mindspeed_rl.engine.vllm.engine\n", 1, "a layer above it"),
    "eager engine": ("workers/a.py", "from mindspeed_rl.engine.vllm.engine import E\n", 1, "only inside functions"),
    "eager vendor in device": ("device/npu.py", "import torch_npu\n", 1, "only inside functions"),
    "vendor as default value": (
        "device/a.py",
        "from importlib import import_module\ndef f(x=import_module('vllm')): ...\n",
        2,
        "only inside functions",
    ),
    "vendor elsewhere": ("trainer/a.py", "def f():\n    import vllm\n", 2, "only in device/ and engine/"),
    "vendor in engine base": (
        "engine/base.py",
        "def f():\n    import megatron.core\n",
        2,
        "only in device/ and engine/",
    ),
    "ray below the dock": ("algorithms/a.py", "def f():\n    import ray\n", 2, "ray is imported only in"),
    "torch in config": ("config/a.py", "def f():\n    import torch.nn\n", 2, "imports without torch"),
    "torch through another": ("common/a.py", "from safetensors import torch\n", 1, "imports without torch"),
    "unlisted package": ("plugins/a.py", "import os\n", 1, "in no package of the table"),
    "import of an unlisted package": (
        "trainer/a.py",
        "import mindspeed_rl.plugins.a\n",
        1,
        "in no package of the table",
    ),
    "content in __init__": ("data/__init__.py", "from os import path\n", 1, "stays empty"),
}


@pytest.mark.parametrize(("file", "text", "line", "message"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_violation_is_reported_with_file_and_line(tmp_path, file, text, line, message):
    code, output = check(tmp_path, {f"mindspeed_rl/{file}": text})
    assert code == 1
    assert output.startswith(f"mindspeed_rl/{file}:{line}: ")
    assert message in output.splitlines()[0]
    assert output.endswith("layers: 1 files, 1 violations\n")


def test_all_violations_are_reported(tmp_path):
    text = "import mindspeed_rl.trainer.a\nimport ray\nimport vllm\n"
    code, output = check(tmp_path, {"mindspeed_rl/data/a.py": text, "mindspeed_rl/data/b.py": "import ray\n"})
    assert code == 1
    starts = [line.split(": ")[0] for line in output.splitlines()[:-1]]
    assert starts == [*(f"mindspeed_rl/data/a.py:{line}" for line in (1, 2, 3)), "mindspeed_rl/data/b.py:1"]


def test_what_is_allowed_passes(tmp_path):
    code, output = check(
        tmp_path,
        {
            "mindspeed_rl/__init__.py": "",
            "mindspeed_rl/common/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
            "mindspeed_rl/config/a.py": "import mindspeed_rl\nfrom mindspeed_rl.common.a import x\n",
            "mindspeed_rl/types.py": "import torch\n",
            "mindspeed_rl/device/a.py": "import torch\ndef f():\n    import torch_npu, mindspeed.x\n",
            "mindspeed_rl/engine/base.py": "from mindspeed_rl import types\n",
            "mindspeed_rl/engine/vllm/a.py": "import vllm\nfrom mindspeed_rl.engine.base import E\nfrom . import b\n",
            "mindspeed_rl/workers/a.py": "import ray\ndef f():\n    from mindspeed_rl.engine.vllm.a import b\n",
            "cli/a.py": "from mindspeed_rl.trainer.launch import run\n",
            "tests/a.py": "import ray, vllm\n",
        },
    )
    assert (code, output) == (0, "layers: 9 files, 0 violations\n")


def test_a_tree_without_the_product_is_an_error(tmp_path):
    code, output = check(tmp_path, {})
    assert code == 1
    assert "no Python files" in output


def test_this_repository_keeps_the_rules():
    code, output = check(REPOSITORY, {})
    assert code == 0, output


def test_config_and_common_import_without_torch_and_ray():
    """The rule itself, in a fresh process: covers what third packages import."""
    packages = ("config", "common")
    files = [path for package in packages for path in (REPOSITORY / "mindspeed_rl" / package).glob("*.py")]
    modules = [f"mindspeed_rl.{path.parent.name}.{path.stem}" for path in files if path.name != "__init__.py"]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert len(modules) >= 4
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
