"""Keep functions and files small enough to read: `python ci/check_size.py [ROOT]`.

Prints `file:line: what is too long` for each violation; the exit code is 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("mindspeed_rl", "cli", "ci", "examples", "benchmarks", "tests")
MAX_FUNCTION_LINES = 80  # from `def` to the last line, docstring included
MAX_FILE_LINES = 500


def check_file(path: Path, root: Path) -> Iterator[str]:
    """Violations of one file as `file:line: text`."""
    relative = path.relative_to(root)
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{relative}:{lines}: {lines} lines, at most {MAX_FILE_LINES} are allowed"
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                limit = f"at most {MAX_FUNCTION_LINES} are allowed"
                yield f"{relative}:{node.lineno}: {node.name} has {length} lines, {limit}"


def main(arguments: list[str]) -> int:
    """Check the Python files below the given root (default: this repository)."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    violations = [violation for path in files for violation in check_file(path, root)]
    for violation in violations:
        print(violation)
    print(f"size: {len(files)} files, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
