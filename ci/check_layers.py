"""Prove the layer rules over every import of the product: `python ci/check_layers.py [ROOT]`.

All imports count: inside functions, under TYPE_CHECKING, and by `import_module("literal")`.
Prints `file:line: what is wrong` for each violation; the exit code is 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = "mindspeed_rl"
FOLDERS = (PRODUCT, "cli")

# From the bottom up. A package imports itself and rows below its own: never its own row, never a row above.
ROWS = (
    (f"{PRODUCT}.common",),
    (f"{PRODUCT}.config",),
    (f"{PRODUCT}.types",),
    (f"{PRODUCT}.device",),
    tuple(f"{PRODUCT}.{name}" for name in ("transfer_dock", "algorithms", "rewards", "tools", "data", "metrics")),
    (f"{PRODUCT}.resharding", f"{PRODUCT}.checkpoint", f"{PRODUCT}.planner"),
    (f"{PRODUCT}.engine.base",),
    (f"{PRODUCT}.engine.megatron", f"{PRODUCT}.engine.vllm"),
    (f"{PRODUCT}.workers",),
    (f"{PRODUCT}.trainer",),
    ("cli",),
)
ROW_OF = {package: row for row, packages in enumerate(ROWS) for package in packages}
ENGINES = (f"{PRODUCT}.engine.megatron", f"{PRODUCT}.engine.vllm")  # may import their vendor at module level

# Packages outside the product that only some of ours may import, and whether only inside functions there.
VENDORS = ("torch_npu", "mindspeed", "megatron", "vllm", "vllm_ascend")
VENDOR_USERS = (*ENGINES, f"{PRODUCT}.device")
RAY_USERS = (f"{PRODUCT}.transfer_dock", f"{PRODUCT}.workers", f"{PRODUCT}.trainer")

# These import without torch, so neither torch nor what brings it in; annotations under TYPE_CHECKING are free.
WITHOUT_TORCH = (f"{PRODUCT}.common", f"{PRODUCT}.config")
BRINGS_TORCH = ("torch", "transformers", "accelerate", "safetensors.torch", *VENDORS)

UNKNOWN = "is in no package of the table ROWS in ci/check_layers.py"


@dataclass(frozen=True)
class Import:
    """One imported name: dotted, absolute; `lazy` if it runs in a function, `typing` if under TYPE_CHECKING."""

    name: str
    line: int
    lazy: bool
    typing: bool


class _Collector(ast.NodeVisitor):
    """Collects the imports of a module; `package` is the package the module lies in, for relative imports."""

    def __init__(self, package: str):
        self.package = package
        self.found: list[Import] = []
        self._functions = 0
        self._typing = 0

    def _add(self, name: str, node: ast.AST) -> None:
        line: int = getattr(node, "lineno", 0)
        self.found.append(Import(name, line, self._functions > 0, self._typing > 0))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = self.package.split(".")[: None if node.level <= 1 else 1 - node.level] if node.level else []
        base = ".".join([*parts, *([node.module] if node.module else [])])
        for alias in node.names:  # the name may be a submodule: `from mindspeed_rl import types`
            self._add(f"{base}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self._add(str(node.args[0].value), node)
        self.generic_visit(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for outside in (*node.decorator_list, node.args):  # decorators and defaults run at import
            self.visit(outside)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1

    visit_FunctionDef = _visit_function
    visit_AsyncFunctionDef = _visit_function

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._functions += 1
        self.visit(node.body)
        self._functions -= 1

    def visit_If(self, node: ast.If) -> None:
        guard = getattr(node.test, "id", None) or getattr(node.test, "attr", None)
        self._typing += guard == "TYPE_CHECKING"
        for statement in node.body:
            self.visit(statement)
        self._typing -= guard == "TYPE_CHECKING"
        self.visit(node.test)
        for statement in node.orelse:
            self.visit(statement)


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _within(name: str, packages: tuple[str, ...]) -> str | None:
    """The one of `packages` that holds `name`."""
    return next((package for package in packages if _is_in(name, package)), None)


def imports_of(path: Path, root: Path) -> list[Import]:
    """Imports of one file, in order of their lines."""
    package = ".".join(path.relative_to(root).parent.parts)
    collector = _Collector(package)
    collector.visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return sorted(collector.found, key=lambda item: item.line)


def check_import(module: str, item: Import) -> str | None:
    """What is wrong with `module` importing `item`, or None."""
    here = _within(module, tuple(ROW_OF))
    assert here is not None, module
    if _within(item.name, FOLDERS):
        return _check_own(here, item)
    vendor = _within(item.name, VENDORS)
    if vendor and not _within(module, VENDOR_USERS):
        return f"{vendor} is imported only in device/ and engine/<engine>/"
    if vendor and not item.lazy and not item.typing and here not in ENGINES:
        return f"{vendor} is imported only inside functions here, so that the package imports without it"
    if _is_in(item.name, "ray") and here not in RAY_USERS:
        return "ray is imported only in transfer_dock, workers and trainer"
    brings = _within(item.name, BRINGS_TORCH)
    if brings and here in WITHOUT_TORCH and not item.typing:
        return f"{here} imports without torch, and {brings} needs it"
    return None


def _check_own(here: str, item: Import) -> str | None:
    there = _within(item.name, tuple(ROW_OF))
    if there is None:
        return None if item.name in FOLDERS else f"{item.name} {UNKNOWN}"
    if there == here:
        return None
    if ROW_OF[there] == ROW_OF[here]:
        return f"{here} imports {there}, its neighbour on the same layer"
    if ROW_OF[there] > ROW_OF[here]:
        return f"{here} imports {there}, which is a layer above it"
    if there in ENGINES and not item.lazy and not item.typing:
        return f"{there} is imported only inside functions, so that {here} imports without its vendor packages"
    return None


def check_file(path: Path, root: Path) -> Iterator[str]:
    """Violations of one file as `file:line: text`."""
    relative = path.relative_to(root)
    module = ".".join(relative.with_suffix("").parts)
    if path.name == "__init__.py":
        if path.read_text(encoding="utf-8").strip():
            yield f"{relative}:1: __init__.py stays empty: importing a package must not import its modules"
        return
    if _within(module, tuple(ROW_OF)) is None:
        yield f"{relative}:1: {module} {UNKNOWN}"
        return
    seen = set()
    for item in imports_of(path, root):
        problem = check_import(module, item)
        if problem and (item.line, problem) not in seen:
            seen.add((item.line, problem))
            yield f"{relative}:{item.line}: {problem}"


def main(arguments: list[str]) -> int:
    """Check the product below the given root (default: this repository)."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    if not files:
        print(f"{root}: no Python files in {' or '.join(FOLDERS)}")
        return 1
    violations = [violation for path in files for violation in check_file(path, root)]
    for violation in violations:
        print(violation)
    print(f"layers: {len(files)} files, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
