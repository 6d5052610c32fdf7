"""Ray workers that are forked from a process which has imported the libraries: they spend 10 to 20 s on that alone.

    python forked_workers.py serve SOCKET              forks for each request
    python -I -S forked_workers.py SOCKET WORKER ...   stands where Ray expects Python: asks for the program WORKER
                                                       with those arguments, and lives as long as it does

Both ends of a request's socket are held for as long as its process lives, so that neither outlives the other.
"""

import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


def python_of_workers() -> str:
    """What Ray is to start instead of Python (`py_executable`); starts the server that it asks."""
    return shlex.join([sys.executable, "-I", "-S", __file__, _server()[0]])


@cache
def _server() -> tuple[str, subprocess.Popen[bytes]]:
    """Its socket; it ends when its standard input does, with this process."""
    path = f"{tempfile.mkdtemp(prefix='workers')}/socket"
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", path], stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return path, server


def _serve(path: str) -> None:
    sys.modules["ray"] = None  # type: ignore[assignment]  # it reads its environment when it is imported
    importlib.import_module("tests.support.preload")
    del sys.modules["ray"]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked
    print("ready", flush=True)
    if os.fork() == 0:  # a thread would not be there in what is forked
        sys.stdin.buffer.read()
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _work(connection)
        connection.close()


def _work(connection: socket.socket) -> NoReturn:
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    data = b""
    while len(data) < int.from_bytes(length):
        data += connection.recv(1 << 16)
    request: dict[str, Any] = json.loads(data)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]

    def end_with_caller() -> None:
        connection.recv(1)
        os._exit(1)

    threading.Thread(target=end_with_caller, daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)


def _ask(path: str, arguments: list[str]) -> None:
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    data = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [len(data).to_bytes(8)], [0, 1, 2])
    connection.sendall(data)
    connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.path[0] = str(ROOT)  # instead of this folder
        sys.path.insert(1, str(ROOT / "tests"))
        _serve(sys.argv[2])
    else:
        _ask(sys.argv[1], sys.argv[2:])
