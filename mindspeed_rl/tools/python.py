"""Python programs that a model writes, each in a process of its own with limits on time, memory and output.

The limits keep mistakes from doing harm. They are no fortress: a program can read and change what the user of
this process can.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from mindspeed_rl.tools.registry import Tool, ToolError

_LARGEST_FILE = 16 * 2**20  # bytes, of output and of whatever a program writes
# runs before the program and becomes it; no code runs between fork and exec of this process, which has threads
_LIMITED = """
import os, resource, sys
seconds, memory, size = map(int, sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.execv(sys.executable, [sys.executable, "-I", "program.py"])
"""
# a network with nothing in it, and processes that all end with the first, whatever they do to get away
_NAMESPACES = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


@functools.cache
def isolation() -> tuple[str, ...]:
    """What to put before a command so that it has no network; nothing where the kernel does not let us."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    tried = subprocess.run([unshare, *_NAMESPACES, "true"], capture_output=True, check=False)
    return (unshare, *_NAMESPACES) if tried.returncode == 0 else ()


def run_program(code: str, seconds: float, memory_mib: int) -> str:
    """What the program prints, its errors too.

    Raises:
        ToolError: it ended with an error; the message is what it had printed.
        TimeoutError: it did not end within `seconds`; it and its children were killed.
    """
    if not isinstance(code, str):
        raise ToolError("the code must be text")
    with tempfile.TemporaryDirectory(prefix="tool_", ignore_cleanup_errors=True) as folder:
        Path(folder, "program.py").write_text(code, encoding="utf-8", errors="replace")
        limits = (str(max(1, int(seconds) + 1)), str(memory_mib * 2**20), str(_LARGEST_FILE))
        command = [*isolation(), sys.executable, "-I", "-c", _LIMITED, *limits]
        with open(Path(folder, "output"), "w+b") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"the program did not end within {seconds:g} s") from None
            finally:
                _kill_session(process)
            output.seek(0)
            text = output.read().decode(errors="replace").strip()
    if status:
        raise ToolError(text or f"the program ended with status {status}")
    return text


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """What a program has started goes with it."""
    with contextlib.suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def python_tool(seconds: float, memory_mib: int) -> Tool:
    """The tool `python` with these limits."""
    return Tool(
        "python",
        "Runs a Python program and gives what it prints.",
        {"code": {"type": "string", "description": "the program"}},
        lambda code: run_program(code, seconds, memory_mib),
    )
