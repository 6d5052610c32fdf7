"""The worked example of docs/transfer_dock.md does what it says."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "transfer_dock.md"


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(code, str(DOCS), "exec"), {})
    said = capsys.readouterr().out.split("[")[1].rstrip("]\n").split(", ")
    assert [round(float(number), 6) for number in said] == [0.6, 0.6, 0.7, 0.7]
