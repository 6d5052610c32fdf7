"""Calculator, sandboxed programs, calls as models write them, and calls under way."""

import http.server
import json
import threading
import time
from pathlib import Path

import pytest

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.tools import ToolsConfig
from mindspeed_rl.tools.calculator import calculate
from mindspeed_rl.tools.calls import ToolCall, find_calls
from mindspeed_rl.tools.python import isolation, run_program
from mindspeed_rl.tools.registry import ToolError
from mindspeed_rl.tools.search import search
from mindspeed_rl.tools.toolbox import CallStatus, Toolbox

MEMORY = 256  # MiB


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12345678901234567890 + 1", "12345678901234567891"),
        ("(1 + 2) * -3", "-9"),
        ("2 ** 10 % 7", "2"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2", "3"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os')", "no arithmetic"),
        ("x + 1", "no arithmetic"),
        ("True + 1", "no arithmetic"),
        ("1 +", "no arithmetic"),
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("9" * 501, "at most 500"),
        ("(" * 240 + "1" + ")" * 240, "no arithmetic"),
    ],
)
def test_the_calculator_refuses(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        calculate(expression)


def test_calls_are_found_and_malformed_ones_say_why() -> None:
    good = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    assert find_calls(f"think {good} {good}") == [ToolCall("calculator", {"expression": "1+1"})] * 2
    assert find_calls("no call") == []
    wrong = ["<tool_call>{", "<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>"]
    wrong.append('<tool_call>{"name": "a", "arguments": 1}</tool_call>')
    reasons = ["has no end", "not valid JSON", "is an object", "arguments are not an object"]
    for text, reason in zip(wrong, reasons, strict=True):
        (call,) = find_calls(text)
        assert reason in (call.error or "")


def test_a_program_prints_and_fails() -> None:
    assert run_program("print(sum(range(5)))", 20, MEMORY) == "10"
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        run_program("1 / 0", 20, MEMORY)
    with pytest.raises(ToolError, match="MemoryError"):
        run_program("b'0' * 2 ** 30", 20, MEMORY)


def test_a_program_sees_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    assert run_program("import os; print(os.environ.get('SECRET'))", 20, MEMORY) == "None"


@pytest.mark.skipif(not isolation(), reason="the kernel gives this user no namespaces")
def test_a_program_has_no_network() -> None:
    with pytest.raises(ToolError, match=r"unreachable|Network"):
        run_program("import socket; socket.create_connection(('127.0.0.2', 9), 1)", 20, MEMORY)


def test_children_die_with_a_program_that_takes_too_long(tmp_path: Path) -> None:
    file = tmp_path / "ticks"
    child = f"import time\nfor _ in range(600): open({str(file)!r}, 'a').write('.'); time.sleep(0.05)"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)"
    with pytest.raises(TimeoutError, match="did not end within 3 s"):
        run_program(code, 3, MEMORY)
    ticks = file.read_text()
    assert ticks
    time.sleep(0.3)
    assert file.read_text() == ticks


def test_search_posts_the_query() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
            self.send_response(200 if query else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"result": f"about {query}"}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert search("stars", url, 10) == "about stars"
        with pytest.raises(ToolError, match="404"):
            search("", url, 10)
        server.shutdown()


USER_FILE = """
import threading
from mindspeed_rl.tools.registry import register_tool

@register_tool("hang", "never ends", {})
def hang():
    threading.Event().wait()

@register_tool("raise", "fails", {})
def fail():
    raise KeyError("gone")

@register_tool("echo", "repeats", {"text": {"type": "string"}})
def echo(text):
    return text
"""


def test_every_call_is_answered_and_a_hanging_one_makes_room(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text(USER_FILE)
    settings = {"tool_file": str(file), "tool_timeout": 0.5, "tool_parallel": 1, "max_answer_length": 10}
    box = Toolbox(ToolsConfig(tools=["hang", "raise", "echo"], **settings))
    calls = [ToolCall("hang"), ToolCall("echo", {"text": "a" * 9 + "b" * 9}), ToolCall("raise"), ToolCall("none")]
    calls += [ToolCall("echo", {"word": 1}), ToolCall(error="malformed")]
    numbers, found = box.submit(calls), {}
    while len(found) < len(calls):
        found |= box.answers(10)
    texts = [found[number].text for number in numbers]
    assert texts[0] == "Error: no answer within 0.5 s"
    assert texts[1] == "aaaaa … bbbbb"
    assert "gone" in texts[2]
    assert [found[number].status for number in numbers] == [CallStatus.TIMED_OUT, CallStatus.OK] + [
        CallStatus.FAILED
    ] * 4
    with pytest.raises(ConfigError, match="did you mean echo"):
        Toolbox(ToolsConfig(tools=["eco"], tool_file=str(file)))
