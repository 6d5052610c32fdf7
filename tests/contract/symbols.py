"""Where a name is defined in the sources of wheels, and how it may be called; none is imported.

A symbol is `module:name`, as in `from module import name`, and may go on: `module:Class.method`. What lies outside
the wheels (a base of torch, of the standard library) is looked at in this environment, if it can be imported here.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tests.contract.signatures import Signature, of_fields, of_function
from tests.contract.wheels import Wheel

DATA_DECORATORS = ("dataclass", "config")  # `config` is vLLM's own, of pydantic
DATA_BASES = (
    "msgspec.Struct",
    "typing.NamedTuple",
    "typing.TypedDict",
    "typing_extensions.TypedDict",
    "pydantic.BaseModel",
)
SETTERS = ("register_buffer", "register_parameter", "setattr")
MOST_HOPS = 20  # of re-exports


# the schemas of torch_npu's operators
OPERATORS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


class MissingSymbol(Exception):
    """The wheels define no such name; says where it was looked for."""


class Module:
    """A parsed file.

    Attributes:
        bindings: statements that bind a name at the top level, inside `if`, `try` and `with` too; not those that only
            a type checker sees.
        stars: modules of which all public names are imported.
        lazy: what a module-level `__getattr__` looks up in a table, as vLLM's does: name -> relative `module:name`.
    """

    def __init__(self, name: str, path: str, source: str):
        self.name, self.path = name, path
        self.package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        self.tree = ast.parse(source)
        self.bindings, stars = _bindings(self.tree.body)
        self.stars = [self.absolute(node) for node in stars]
        self.lazy: dict[str, str] = {}
        if "__getattr__" in self.bindings:
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
                    self.lazy |= {
                        k.value: v.value for k, v in zip(node.keys, node.values, strict=True) if _is_symbol(v)
                    }

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that `from … import` names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])

    @cached_property
    def public(self) -> set[str] | None:
        """Names in `__all__`, or None if it is not there or not just listed."""
        value = getattr(self.bindings.get("__all__", [None])[0], "value", None)
        return (
            set(ast.literal_eval(value)) if isinstance(value, ast.List | ast.Tuple) and _is_literal(value) else None
        )


@dataclass(frozen=True)
class Definition:
    """What a name stands for.

    kind: "module", "class", "function"; "value", of which no more is known; "instance" of a class; "outside" all
    wheels, or in compiled code: not looked at.
    """

    kind: str
    path: str
    line: int
    module: Module | None = None
    node: Any = None
    owner: Definition | None = None  # the class of a method
    name: str = ""  # of what is outside


class Library:
    """The wheels of one version line, which import each other.

    Args:
        wheels: of different packages.
        parsed: modules by wheel and name, which libraries may share.
    """

    def __init__(self, wheels: Iterable[Wheel], parsed: dict[tuple[str, str], Module | None] | None = None):
        self._wheel_of = {package: wheel for wheel in wheels for package in wheel.packages}
        self._parsed = {} if parsed is None else parsed
        # by node of a syntax tree, which stays as long as its entry: an `id` is soon that of another
        self._bodies: dict[Any, dict[str, list[Any]]] = {}
        self._sets: dict[Any, dict[str, int]] = {}
        self._signatures: dict[Any, Signature | None] = {}
        self._orders: dict[Any, list[Definition]] = {}

    def module(self, name: str) -> Module | None:
        """A module with a source."""
        wheel = self._wheel_of.get(name.split(".")[0])
        if wheel is None:
            return None
        key = str(wheel), name
        if key not in self._parsed:
            path = wheel.path(name)
            self._parsed[key] = Module(name, path, wheel.source(path)) if path is not None else None
        return self._parsed[key]

    # ---- names -----------------------------------------------------------------------------------------------------

    def find(self, symbol: str) -> Definition:
        """The definition of `module:name`.

        Raises:
            MissingSymbol: a part of it is not there.
        """
        module, _, names = symbol.partition(":")
        found = self._as_module(module)
        if found is None:
            raise MissingSymbol(f"there is no module {module}")
        seen = module
        for name in filter(None, names.split(".")):
            member = self.member(found, name)
            if member is None:
                raise MissingSymbol(f"{seen} has no {name}")
            found, seen = member, f"{seen}.{name}"
        return found

    def member(self, of: Definition, name: str, hops: int = MOST_HOPS) -> Definition | None:
        """An attribute of what was found, or None if it has none of this name."""
        if of.kind == "module":
            return self._in_module(of, name, hops)
        if of.kind in ("class", "instance"):
            return self._in_class(of, name)
        if of.kind == "outside":
            return _looked_up(of, name)
        return None if of.kind == "function" else Definition("outside", of.path, of.line)

    def _as_module(self, name: str) -> Definition | None:
        module = self.module(name)
        if module is not None:
            return Definition("module", module.path, 1, module)
        wheel = self._wheel_of.get(name.split(".")[0])
        if wheel is None:
            return Definition("outside", "", 0, name=name)
        if wheel.has_folder(name):  # a namespace
            return Definition("module", name.replace(".", "/"), 1, name=name)
        path = wheel.compiled(name)
        return Definition("outside", path, 0) if path else None

    def _in_module(self, of: Definition, name: str, hops: int) -> Definition | None:
        module = of.module
        if module is None or hops == 0:
            return self._as_module(f"{of.name}.{name}")
        found = []
        for node in module.bindings.get(name, ()):
            found.append(self._bound(module, node, name, hops - 1))
            if found[-1] is not None and found[-1].kind != "outside":
                break  # of alternatives (`try … except ImportError`) what is inside the wheels says most
        if name in module.lazy:
            target, _, attribute = module.lazy[name].partition(":")
            node = ast.ImportFrom(target.lstrip("."), [], len(target) - len(target.lstrip(".")))
            found.append(self._imported(module.absolute(node), attribute, hops - 1))
        if not any(found) and self._wheel_of[module.name.split(".")[0]].has_module(f"{module.name}.{name}"):
            found.append(self._as_module(f"{module.name}.{name}"))
        for star in () if any(found) else module.stars:
            source = self.module(star)
            if source is not None and (not name.startswith("_") if source.public is None else name in source.public):
                found.append(self._imported(star, name, hops - 1))
        known = [definition for definition in found if definition is not None]
        return next((d for d in known if d.kind != "outside"), known[0] if known else self._operator(module, name))

    def _bound(self, module: Module, node: Any, name: str, hops: int) -> Definition | None:
        here = Definition("value", module.path, node.lineno, module, node)
        if isinstance(node, ast.ClassDef):
            return Definition("class", module.path, node.lineno, module, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return Definition("function", module.path, node.lineno, module, node)
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
            return self._as_module(alias.name if alias.asname else name)
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            return self._here(here, self._imported(module.absolute(node), alias.name, hops))
        value = node.value
        if isinstance(value, ast.Name | ast.Attribute):
            return self._here(here, self._expression(module, value, hops)) or here
        if isinstance(value, ast.Call):
            made = self._expression(module, value.func, hops)
            if made is not None and made.kind == "class":
                return Definition("instance", module.path, node.lineno, made.module, made.node)
        return here

    @staticmethod
    def _here(here: Definition, found: Definition | None) -> Definition | None:
        """What a name is bound to or, if that is outside, where the name is bound."""
        is_outside = found is not None and found.kind == "outside" and not found.path
        return replace(here, kind="outside", name=found.name) if is_outside and found else found

    def _imported(self, module: str, name: str, hops: int) -> Definition | None:
        of = self._as_module(module)
        return self.member(of, name, hops) if of is not None and hops > 0 else None

    def _expression(self, module: Module, node: ast.expr, hops: int = MOST_HOPS) -> Definition | None:
        """What a dotted name means in a module."""
        if isinstance(node, ast.Subscript):  # Generic[T]
            return self._expression(module, node.value, hops)
        if isinstance(node, ast.Attribute):
            of = self._expression(module, node.value, hops)
            return self.member(of, node.attr, hops) if of is not None else None
        if isinstance(node, ast.Name) and hops > 0:
            return self._in_module(Definition("module", module.path, 1, module), node.id, hops)
        return None

    def _operator(self, module: Module, name: str) -> Definition | None:
        """torch_npu copies its operators out of `torch.ops.npu`; what they take, the schemas say they are made of."""
        if module.name != "torch_npu":
            return None
        for number, line in enumerate(self._wheel_of["torch_npu"].source(OPERATORS).splitlines(), 1):
            head, _, rest = line.strip().removeprefix("- ").partition("(")
            if head == f"func: {name}":
                parameters = ", ".join(map(_parameter, rest.rpartition(") ->")[0].split(", ")))
                (node,) = ast.parse(f"def {name}({parameters}): ...").body
                return Definition("function", OPERATORS, number, module, node)
        return None

    # ---- classes ---------------------------------------------------------------------------------------------------

    def bases(self, of: Definition) -> list[Definition]:
        """The class itself, and its bases, nearest first; those outside the wheels too."""
        if of.node not in self._orders:
            order = [of]
            assert of.module is not None
            for expression in of.node.bases:
                base = self._expression(of.module, expression)
                if base is not None:
                    order += self.bases(base) if base.kind == "class" else [base]
            self._orders[of.node] = list({(d.path, d.line, d.name): d for d in order}.values())
        return self._orders[of.node]

    def _in_class(self, of: Definition, name: str) -> Definition | None:
        """What a class or its bases define or, as that takes longer to find, set on `self` in their methods."""
        for base in self.bases(of):
            is_outside = base.kind == "outside"
            found = (_looked_up(base, name) if base.name else None) if is_outside else self._defined(base, name)
            if found is not None:
                return found
        for base in self.bases(of):
            if base.kind != "outside":
                line = self._set_lines(base.node).get(name)
                if line is not None:
                    return replace(base, kind="value", line=line, node=None)
        return None

    def _defined(self, of: Definition, name: str) -> Definition | None:
        """What the body of a class itself defines."""
        if of.node not in self._bodies:
            self._bodies[of.node] = _bindings(of.node.body)[0]
        for node in self._bodies[of.node].get(name, ()):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            is_property = is_function and any("property" in ast.unparse(d) for d in node.decorator_list)
            kind = "function" if is_function and not is_property else "value"
            return Definition(kind, of.path, node.lineno, of.module, node, of)
        return None

    def _set_lines(self, node: ast.ClassDef) -> dict[str, int]:
        """Where methods of a class set attributes of `self`, by name."""
        if node not in self._sets:
            self._sets[node] = _set_lines(node)
        return self._sets[node]

    # ---- calls -----------------------------------------------------------------------------------------------------

    def signature(self, of: Definition) -> Signature | None:
        """How it is called; None if that is not known."""
        if of.kind not in ("class", "function"):
            return None
        if of.node not in self._signatures:
            self._signatures[of.node] = self._signature(of)
        return self._signatures[of.node]

    def _signature(self, of: Definition) -> Signature | None:
        if of.kind == "function":
            return of_function(of.node, is_bound=of.owner is not None)
        for base in self.bases(of):
            init = self._defined(base, "__init__") if base.kind == "class" else None
            if init is not None:
                return self.signature(init)
            if base.kind == "class" and self._is_data(base):
                classes = [c for c in reversed(self.bases(base)) if c.kind == "class" and self._is_data(c)]
                return of_fields([c.node for c in classes])
        return None

    def _is_data(self, of: Definition) -> bool:
        decorators = (d.func if isinstance(d, ast.Call) else d for d in of.node.decorator_list)
        if any(ast.unparse(decorator).split(".")[-1] in DATA_DECORATORS for decorator in decorators):
            return True
        return any(base.name in DATA_BASES for base in self.bases(of))


def _bindings(body: Sequence[ast.stmt]) -> tuple[dict[str, list[Any]], list[ast.ImportFrom]]:
    """Statements by the name that they bind, and star imports."""
    found: dict[str, list[Any]] = {}
    stars = []
    for node in _flat(body):
        if isinstance(node, ast.Import):
            names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
            stars += [node] if names == ["*"] else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_overload = any(ast.unparse(d).split(".")[-1] == "overload" for d in node.decorator_list)
            names = [] if is_overload else [node.name]
        elif isinstance(node, ast.Assign):
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            names = [node.target.id] if isinstance(node.target, ast.Name) else []
        else:
            continue
        for name in names:
            found.setdefault(name, []).append(node)
    return found, stars


def _flat(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements that run when the body does, whatever the conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            yield from _flat(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _flat(getattr(node, part, ()))


def _set_lines(node: ast.ClassDef) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            if isinstance(part.value, ast.Name) and part.value.id == "self":
                found.setdefault(part.attr, part.lineno)
        elif isinstance(part, ast.Call) and getattr(part.func, "attr", getattr(part.func, "id", "")) in SETTERS:
            names = [a.value for a in part.args[:2] if isinstance(a, ast.Constant)]
            found |= {name: part.lineno for name in names if isinstance(name, str)}
    return found


def _looked_up(of: Definition, name: str) -> Definition | None:
    """An attribute of something outside the wheels; if it cannot be imported here, nothing is known of it."""
    dotted = f"{of.name}.{name}" if of.name else ""
    found = Definition("outside", of.path, of.line, name=dotted)
    target = _import(of.name) if of.name else None
    return found if target is None or hasattr(target, name) else None


def _import(dotted: str) -> Any:
    """A module or something in it; None if it is not installed."""
    parts = dotted.split(".")
    try:
        target = importlib.import_module(parts[0])
    except ImportError:
        return None
    for part in parts[1:]:
        if not hasattr(target, part):
            return None
        target = getattr(target, part)
    return target


def _parameter(argument: str) -> str:
    """Of a schema, as Python has it: `int dim=-1` is `dim=None`."""
    name, equals, _ = argument.split()[-1].partition("=")
    return f"{name}=None" if equals else name


def _is_symbol(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value


def _is_literal(node: ast.List | ast.Tuple) -> bool:
    return all(isinstance(element, ast.Constant) for element in node.elts)
