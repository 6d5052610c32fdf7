"""Keep calls to a vendor's device API in `mindspeed_rl/device`: `python ci/check_device_api.py [ROOT]`.

Elsewhere a device is reached through `device/base.py` only, so that a run on one kind of device touches no other.
Found are `torch.cuda` and its like however they are imported, `tensor.cuda()`, the vendor's own module, and the name
of a device where torch takes one. Names that are compared with, as `device.name == "npu"`, choose nothing: they are
free.

Prints `file:line: what is wrong` for each violation; the exit code is 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PRODUCT = "mindspeed_rl"
FREE = f"{PRODUCT}/device/"

KINDS = ("cuda", "npu")
VENDOR_APIS = tuple(f"torch.{kind}" for kind in KINDS)
VENDOR_MODULE = "torch_npu"
DEVICE = re.compile(rf"({'|'.join(KINDS)})(:.*)?")
# what takes a device by position, by the name after the last dot; all calls may take one by these keywords
TAKES_DEVICE = ("to", "device", "autocast", "set_default_device", "init_device_mesh")
KEYWORDS = ("device", "device_type", "map_location", "device_id", "pin_memory_device")
THROUGH = "goes through mindspeed_rl/device/base.py"


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _is_in(name: str, packages: tuple[str, ...]) -> str | None:
    """The one of `packages` that is `name` or holds it."""
    return next((package for package in packages if name == package or name.startswith(f"{package}.")), None)


def _names_device(node: ast.AST) -> str | None:
    """The device that a literal, or the beginning of an f-string, names."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and DEVICE.fullmatch(node.value):
        return node.value
    return None


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        yield f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name


def _in_call(node: ast.Call) -> Iterator[str]:
    name = _dotted(node.func) or getattr(node.func, "attr", "")
    last = name.rsplit(".", 1)[-1]
    if isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
        yield f".{node.func.attr}() {THROUGH}"
    given = list(node.args) if last in TAKES_DEVICE else []
    given += [keyword.value for keyword in node.keywords if keyword.arg in KEYWORDS]
    for device in filter(None, map(_names_device, given)):
        yield f"{device!r} given to {last or 'a call'} {THROUGH}"
    loads = last in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant)
    if loads and _is_in(str(node.args[0].value), (VENDOR_MODULE, *VENDOR_APIS)):
        yield f"the import of {node.args[0].value} {THROUGH}"


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and description of each violation in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imported(node):
                if _is_in(name, (VENDOR_MODULE, *VENDOR_APIS)):
                    yield node.lineno, f"the import of {name} {THROUGH}"
        elif isinstance(node, ast.Attribute) and _dotted(node) in VENDOR_APIS:
            yield node.lineno, f"{_dotted(node)} {THROUGH}"
        elif isinstance(node, ast.Call):
            for problem in _in_call(node):
                yield node.lineno, problem


def check_file(path: Path, root: Path) -> Iterator[str]:
    """Violations of one file as `file:line: text`, in order of their lines."""
    relative = path.relative_to(root)
    for line, problem in sorted(set(violations(ast.parse(path.read_text(encoding="utf-8"), str(path))))):
        yield f"{relative}:{line}: {problem}"


def main(arguments: list[str]) -> int:
    """Check the product below the given root (default: this repository)."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    files = sorted(path for folder in (PRODUCT, "cli") for path in (root / folder).rglob("*.py"))
    files = [path for path in files if not path.relative_to(root).as_posix().startswith(FREE)]
    found = [violation for path in files for violation in check_file(path, root)]
    for violation in found:
        print(violation)
    print(f"device API: {len(files)} files, {len(found)} violations")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
