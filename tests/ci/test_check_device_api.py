"""The device check finds each way to reach a device past `device/`, and leaves names of devices alone."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "ci" / "check_device_api.py"


def check(root: Path, files: dict[str, str]) -> tuple[int, str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


VIOLATIONS = {
    "call": ("import torch\ntorch.cuda.synchronize()", "torch.cuda goes"),
    "reference": ("import torch\nfree = torch.npu.empty_cache", "torch.npu goes"),
    "import": ("\nimport torch.cuda", "import of torch.cuda"),
    "import from": ("\nfrom torch import cuda", "import of torch.cuda"),
    "import of a name": ("\nfrom torch.cuda.amp import autocast", "import of torch.cuda.amp.autocast"),
    "vendor": ("def f():\n    import torch_npu", "import of torch_npu"),
    "vendor by name": ("from importlib import import_module\nimport_module('torch_npu')", "import of torch_npu"),
    "method": ("x = [1]\nx[0].cuda()", ".cuda() goes"),
    "method of the other": ("\nmodule.npu()", ".npu() goes"),
    "to": ("\ny = x.to('cuda:1', int)", "'cuda:1' given to to"),
    "factory": ("\ntorch.zeros(3, device='cuda')", "'cuda' given to zeros"),
    "factory of a call": ("\nf()(device='npu')", "'npu' given to a call"),
    "device": ("\nd = torch.device('npu', 0)", "'npu' given to device"),
    "f-string": ("\nd = torch.device(f'npu:{rank}')", "'npu:' given to device"),
    "loaded": ("\ntorch.load(path, map_location='cuda')", "'cuda' given to load"),
}


@pytest.mark.parametrize(("text", "message"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_violation_is_reported_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    code, output = check(tmp_path, {"mindspeed_rl/engine/a.py": text})
    assert code == 1
    assert output.startswith("mindspeed_rl/engine/a.py:2: ")
    assert message in output.splitlines()[0]
    assert output.endswith("device API: 1 files, 1 violations\n")


def test_what_is_allowed_passes(tmp_path: Path) -> None:
    allowed = {
        "mindspeed_rl/device/a.py": "import torch_npu\ntorch.cuda.synchronize()\nx.to('npu')\n",
        "mindspeed_rl/engine/a.py": (
            "device = make_device('npu')\nif device.name == 'npu' or x.device.type == 'cuda':\n    x.to('cpu')\n"
            "loaders = {'npu': 1}\nfrom mindspeed_rl.device import cuda, npu\nnpu.load('npu.txt', 'cuda')\n"
            "x.to(device.current())\nfrom megatron.core.tensor_parallel.random import get_cuda_rng_tracker\n"
        ),
        "tests/a.py": "torch.cuda.synchronize()\n",
    }
    assert check(tmp_path, allowed) == (0, "device API: 1 files, 0 violations\n")


def test_a_tree_without_the_product_is_an_error(tmp_path: Path) -> None:
    assert check(tmp_path, {}) == (1, "device API: 0 files, 0 violations\n")


def test_this_repository_keeps_the_rule() -> None:
    code, output = check(REPOSITORY, {})
    assert code == 0, output
