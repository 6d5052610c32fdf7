"""What a function, or the constructor of a class, can be called with."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """Arguments of one of our calls."""

    positional: int = 0
    keywords: tuple[str, ...] = ()
    is_open: bool = False  # there may be more: `*args` or `**kwargs`

    @classmethod
    def of(cls, node: ast.Call) -> Call:
        """As it is written."""
        named = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        is_open = len(plain) < len(node.args) or len(named) < len(node.keywords)
        return cls(len(plain), named, is_open)

    def __str__(self) -> str:
        arguments = ["_"] * self.positional + [f"{name}=" for name in self.keywords] + ["…"] * self.is_open
        return f"({', '.join(arguments)})"


@dataclass(frozen=True)
class Signature:
    """Parameters, without `self`."""

    positional: tuple[str, ...] = ()  # that may be given by position, in order
    keywords: frozenset[str] = frozenset()  # that may be given by name
    required: frozenset[str] = frozenset()
    takes_more: bool = False  # `*args`
    takes_any: bool = False  # `**kwargs`

    def objections(self, call: Call) -> list[str]:
        """Why a call would be a TypeError."""
        found = []
        by_position = self.positional[: call.positional]
        if call.positional > len(self.positional) and not self.takes_more:
            found.append(f"takes {len(self.positional)} positional arguments, not {call.positional}")
        unknown = [name for name in call.keywords if name not in self.keywords and not self.takes_any]
        if unknown:
            found.append(f"has no parameter {', '.join(unknown)}")
        twice = [name for name in call.keywords if name in by_position]
        if twice:
            found.append(f"gets {', '.join(twice)} twice")
        missing = self.required.difference(by_position, call.keywords)
        if missing and not call.is_open:
            found.append(f"needs {', '.join(sorted(missing))}")
        return found


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, is_bound: bool) -> Signature:
    """Of a function; `is_bound`: of a method, as called on its object."""
    arguments = node.args
    in_order = [*arguments.posonlyargs, *arguments.args]
    required = {argument.arg for argument in in_order[: len(in_order) - len(arguments.defaults)]}
    required |= {a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default}
    if is_bound and not any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list):
        required.discard(in_order[0].arg)
        in_order = in_order[1:]
    by_name = {argument.arg for argument in [*in_order, *arguments.kwonlyargs]}
    return Signature(
        tuple(argument.arg for argument in in_order),
        frozenset(by_name.difference(argument.arg for argument in arguments.posonlyargs)),
        frozenset(required),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def of_fields(classes: Sequence[ast.ClassDef]) -> Signature:
    """Of the constructor that is made of the annotated fields of data classes, the farthest base first."""
    fields: dict[str, tuple[bool, bool]] = {}  # by name: whether it is required, and whether it has a position
    for node in classes:
        settings = [k for d in node.decorator_list if isinstance(d, ast.Call) for k in d.keywords] + node.keywords
        has_position = not any(s.arg == "kw_only" and ast.unparse(s.value) == "True" for s in settings)
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            annotation = ast.unparse(statement.annotation)
            if annotation.endswith("KW_ONLY"):
                has_position = False
            elif "ClassVar" not in annotation and not _is_set_to(statement.value, "init", "False"):
                fields[statement.target.id] = (not _has_default(statement.value), has_position)
    return Signature(
        tuple(name for name, (_, has_position) in fields.items() if has_position),
        frozenset(fields),
        frozenset(name for name, (is_required, _) in fields.items() if is_required),
    )


def _is_set_to(value: Any, name: str, text: str) -> bool:
    """Whether a field is made with such a setting."""
    return isinstance(value, ast.Call) and any(k.arg == name and ast.unparse(k.value) == text for k in value.keywords)


def _has_default(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in ("field", "Field"):
        return bool(value.args) or any(k.arg in ("default", "default_factory") for k in value.keywords)
    return value is not None
