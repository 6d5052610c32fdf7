"""Compiles `simulated.cpp` with the machine's compiler, once for each content and torch, and loads it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("simulated.cpp")
NAME = "simulated_npu"
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={NAME}")


def _folder() -> Path:
    return Path(os.environ.get("SIMULATED_NPU_CACHE") or Path(tempfile.gettempdir()) / f"simulated_npu_{os.getuid()}")


def _compile(library: Path) -> None:
    installed = Path(torch.__file__).parent
    headers = [installed / "include", installed / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    libraries = [f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    partial = library.with_suffix(".partial")
    command = [os.environ.get("CXX", "g++"), *OPTIONS, abi, *(f"-I{folder}" for folder in headers), str(SOURCE)]
    command += [f"-L{installed / 'lib'}", *libraries, "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated NPU does not compile: {' '.join(command)}\n{done.stderr[-4000:]}")
    partial.replace(library)


def load() -> ModuleType:
    """The extension; processes that need it at the same time wait for the one that compiles it."""
    content = f"{SOURCE.read_text()}{OPTIONS}{torch.__version__}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder = _folder()
    library = folder / f"{NAME}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
