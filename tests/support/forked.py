"""Starts `cli/*.py` without importing the libraries anew: a run would spend 5 to 10 s on that before it begins.

As a program it is a server: it has imported what the driver of a run needs, and forks for each command that it reads,
a line of JSON. What is disturbed while it runs (signals, kills) is started as users do, not from here.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forked_workers import python_of_workers

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 280  # seconds


@cache
def _server() -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "tests.support.forked"]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def run_forked(command: str, arguments: list[str], output: Path) -> int:
    """Exit code of `python cli/<command>.py <arguments>`, whose output and errors go to the file `output`.

    It is minus the signal's number if one has ended the command, as the deadline does.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    request = {
        "command": command,
        "arguments": arguments,
        "output": str(output),
        "environment": dict(os.environ),
        "python_of_workers": python_of_workers(),
    }
    print(json.dumps(request), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    assert answer, "the server has ended"
    return int(answer)


def _serve() -> None:
    importlib.import_module("mindspeed_rl.trainer.launch")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anyone prints is not an answer
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _run(json.loads(line))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(request: dict[str, Any]) -> NoReturn:
    signal.alarm(DEADLINE)  # ends it
    os.environ.clear()
    os.environ.update(request["environment"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    _fork_workers(request["python_of_workers"])
    sys.argv = [f"{request['command']}.py", *request["arguments"]]
    sys.exit(importlib.import_module(f"cli.{request['command']}").main(request["arguments"]))


def _fork_workers(python: str) -> None:
    """What Ray starts from here on asks for its workers there."""
    import ray

    init = ray.init

    def init_with(*given: Any, runtime_env: dict[str, Any], **named: Any) -> Any:
        return init(*given, runtime_env={**runtime_env, "py_executable": python}, **named)

    ray.init = init_with


if __name__ == "__main__":
    _serve()
