"""What the product uses of its vendors' packages, collected from its own source.

Found without help are imported names; attributes of imported modules and classes; calls, with their arguments; and
of a class that derives from a vendor's, what it overrides, what it asks of its base, and what it reads or sets on
`self` that is not its own. What a variable holds, `tests.contract.tables` says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.contract import tables
from tests.contract.signatures import Call, Signature, of_function

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = "mindspeed_rl"
VENDORS = ("megatron", "torch_npu", "vllm", "vllm_ascend")
ENVIRONMENT = re.compile(r"VLLM_[A-Z0-9_]+")


@dataclass(frozen=True)
class Use:
    """Something that has to be there in a wheel.

    Attributes:
        symbol: `module:name`; several with ` | ` between them: one of these has it. `{name}` differs by version line.
        file, line: where we use it.
        call: it is called so.
        literal: instead of a name: the module has this text as a value.
        callee, ours, given: instead of a name: all calls that the module makes of `callee` must be fit for this
            function of ours, which gets the arguments `given` besides.
    """

    symbol: str
    file: str
    line: int
    call: Call | None = None
    literal: str | None = None
    callee: str | None = None
    ours: Signature | None = None
    given: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """`file:line`, in the product."""
        return f"{self.file}:{self.line}"


@dataclass
class Source:
    """A file of the product."""

    file: str  # below the product's folder
    tree: ast.Module
    names: dict[str, str] = field(default_factory=dict)  # what a name means, imported anywhere in the file

    def __post_init__(self) -> None:
        self.nodes = list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Its dotted name."""
        return f"{PRODUCT}.{self.file.removesuffix('.py').replace('/', '.')}"

    def function(self, name: str) -> ast.FunctionDef:
        """A function, or `Class.method`."""
        body: list[ast.stmt] = self.tree.body
        for part in name.split("."):
            found = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
            assert found, f"there is no {name} any more where tests/contract/tables.py says so"
            node = found[0]
            body = node.body
        assert isinstance(node, ast.FunctionDef), name
        return node


@dataclass
class Derived:
    """A class of ours whose base is a vendor's."""

    node: ast.ClassDef
    base: str
    own: set[str]  # attributes that are not the base's

    @property
    def fields(self) -> set[str]:
        """Which it adds to a dataclass."""
        if not any("dataclass" in ast.unparse(decorator) for decorator in self.node.decorator_list):
            return set()
        return {
            s.target.id for s in self.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        }


class Product:
    """All sources of the product."""

    def __init__(self, root: Path = ROOT / PRODUCT):
        paths = sorted(root.rglob("*.py"))
        self.sources = {
            str(path.relative_to(root)): Source(str(path.relative_to(root)), ast.parse(path.read_text("utf-8")))
            for path in paths
        }
        self.unused = {
            (file, text) for table in (tables.OBJECTS, tables.CALLABLES) for file in table for text in table[file]
        }
        for source in self.sources.values():
            for name, symbol in self._imported(source):  # of one name: `try … except ImportError`
                known = source.names.get(name, symbol)
                source.names[name] = symbol if known == symbol else f"{known} | {symbol}"
        self.derived = {f"{s.module}:{node.name}": d for s in self.sources.values() for node, d in self._derived(s)}
        for source in self.sources.values():
            source.names |= {name: symbol for name, symbol in _own_names(source) if symbol in self.derived}

    @cached_property
    def uses(self) -> list[Use]:
        """All uses, each once."""
        found: list[Use] = []
        for source in self.sources.values():
            collector = _Collector(self, source)
            collector.visit(source.tree)
            found += collector.found
            found += _environment(source)
        found += [use for row in tables.KEYS for use in self._keys(*row)]
        found += [self._attribute(*row) for row in tables.ATTRIBUTES]
        found += [self._literal(*row) for row in tables.LITERALS]
        found += [self._called(*row) for row in tables.CALLED]
        return list(dict.fromkeys(found))

    @cached_property
    def read(self) -> set[str]:
        """Names of all attributes that are read anywhere, on whatever object."""
        nodes = [node for source in self.sources.values() for node in source.nodes]
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        return names | {name for node in nodes if (name := _looked_up(node))}

    def _imported(self, source: Source) -> Iterator[tuple[str, str]]:
        for node in source.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in VENDORS:
                        yield alias.asname or alias.name.split(".")[0], f"{alias.name}:"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in VENDORS:
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}:{alias.name}"

    def _derived(self, source: Source) -> Iterator[tuple[ast.ClassDef, Derived]]:
        for node in source.tree.body:
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                if ast.unparse(base) in source.names:
                    assert isinstance(node, ast.ClassDef)
                    yield node, Derived(node, source.names[ast.unparse(base)], self._own(node))

    def _own(self, node: ast.ClassDef) -> set[str]:
        """What it defines that its base does not know: nobody but the vendor's code looks at what we do not read."""
        own = {s.name for s in node.body if isinstance(s, ast.FunctionDef) and not self.overrides(s)}
        own |= {
            s.targets[0].id for s in node.body if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
        }
        for method in node.body:
            is_ours = isinstance(method, ast.FunctionDef) and (method.name in own or method.name == "__init__")
            for part in ast.walk(method) if is_ours else ():
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part.attr in self.read:
                    own |= {part.attr} if ast.unparse(part.value) == "self" else set()
        return own

    def overrides(self, method: ast.FunctionDef) -> bool:
        """Whether a method takes the place of its base's: it calls that one, or nothing of ours calls it."""
        calls_base = any(ast.unparse(node) == f"super().{method.name}" for node in ast.walk(method))
        return calls_base or method.name not in self.read

    # ---- tables ----------------------------------------------------------------------------------------------------

    def _keys(self, file: str, function: str, symbol: str, under: str) -> Iterator[Use]:
        """Keys of dictionaries that a function makes, which become named arguments."""
        found = list(_keys(self.sources[file].function(function), under))
        assert found, f"{file}: {function} makes no dictionary"
        for node, key in found:
            yield Use(symbol, file, node.lineno, Call(0, (key,), is_open=True))

    def _attribute(self, file: str, name: str, symbol: str) -> Use:
        return Use(_joined(symbol, name), file, self._line(file, name))

    def _literal(self, file: str, literal: str, module: str) -> Use:
        return Use(f"{module}:", file, self._line(file, literal), literal=literal)

    def _line(self, file: str, text: str) -> int:
        """The first with a name or value."""
        found = [
            n.lineno for n in self.sources[file].nodes if text in (getattr(n, "value", 0), getattr(n, "attr", 0))
        ]
        assert found, f"{file} has no {text!r}"
        return min(found)

    def _called(self, file: str, function: str, module: str, callee: str, given: tuple[str, ...]) -> Use:
        node = self.sources[file].function(function)
        return Use(
            f"{module}:", file, node.lineno, callee=callee, ours=of_function(node, "." in function), given=given
        )


class _Collector(ast.NodeVisitor):
    """Uses in one file."""

    def __init__(self, product: Product, source: Source):
        self.product, self.source, self.found = product, source, list[Use]()
        self._class: Derived | None = None
        self._functions: list[str] = []

    def _add(self, symbol: str | None, node: ast.AST, call: Call | None = None) -> None:
        symbol, call = self._of_vendor(symbol or "", call)
        for one in symbol.split(" & ") if symbol else ():
            self.found.append(Use(one, self.source.file, getattr(node, "lineno", 0), call))

    def _of_vendor(self, symbol: str, call: Call | None) -> tuple[str, Call | None]:
        """What an attribute, or the constructor, of a class of ours is of its base; nothing if it is our own."""
        if not symbol.startswith(PRODUCT):
            return symbol, call
        head, *names = _split(symbol)
        derived = self.product.derived[head]
        if names and names[0] in derived.own | derived.fields | {"__class__"}:
            return "", None
        if not names and call is not None:
            if any(getattr(s, "name", "") == "__init__" for s in derived.node.body):
                return "", None
            kept = tuple(name for name in call.keywords if name not in derived.fields)
            call = Call(call.positional, kept, call.is_open)
        return ".".join([derived.base, *names]), call

    def _meaning(self, node: ast.expr) -> str:
        """The symbol that an expression stands for, or ''."""
        text = ast.unparse(node)
        known = tables.OBJECTS.get(self.source.file, {})
        for key in (f"{self._functions[-1]}: {text}" if self._functions else text, text):
            if key in known:
                self.product.unused.discard((self.source.file, key))
                return known[key]
        if text == "super()" and self._class:
            return self._class.base
        if text == "self" and self._class:
            return f"{self.source.module}:{self._class.node.name}"
        if isinstance(node, ast.Name):
            return self.source.names.get(node.id, "")
        return self._member(node) if isinstance(node, ast.Attribute) else ""

    def _member(self, node: ast.Attribute) -> str:
        return _joined(self._meaning(node.value), node.attr)

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(self.source.names.get(alias.asname or alias.name.split(".")[0]), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._add(self.source.names.get(alias.asname or alias.name), alias)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self._class
        self._class = self.product.derived.get(f"{self.source.module}:{node.name}")
        for method in node.body if self._class else ():
            if isinstance(method, ast.FunctionDef) and self.product.overrides(method):
                self._add(_joined(self._class.base, method.name), method)
        self.generic_visit(node)
        self._class = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        text = ast.unparse(node.func)
        known = tables.CALLABLES.get(self.source.file, {})
        if text in known:
            self.product.unused.discard((self.source.file, text))
            self._add(known[text], node, Call.of(node))
        elif isinstance(node.func, ast.Attribute):
            self._add(self._member(node.func), node, Call.of(node))
        elif isinstance(node.func, ast.Name):
            self._add(self.source.names.get(node.func.id), node, Call.of(node))
        if _looked_up(node):
            self._add(_joined(self._meaning(node.args[0]), _looked_up(node)), node)
        inside = node.func.value if isinstance(node.func, ast.Attribute) else None
        for child in (*([inside] if inside else [node.func]), *node.args, *node.keywords):
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr != "__class__":
            self._add(self._member(node), node)
        self.visit(node.value)


def _split(symbol: str) -> list[str]:
    """`module:Class.a.b` as `module:Class`, `a`, `b`."""
    module, _, names = symbol.partition(":")
    head, *rest = names.split(".")
    return [f"{module}:{head}", *rest]


def _joined(symbol: str, name: str) -> str:
    """Of each of several, an attribute."""
    parts = re.split(r"( [|&] )", symbol) if symbol else []
    return "".join(p if p.strip() in "|&" else f"{p}{name}" if p.endswith(":") else f"{p}.{name}" for p in parts)


def _looked_up(node: ast.AST) -> str:
    """The name that `getattr` or `hasattr` looks for."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
        name = node.args[1]
        return str(name.value) if isinstance(name, ast.Constant) else ""
    return ""


def _own_names(source: Source) -> Iterator[tuple[str, str]]:
    """Classes that a file defines or imports from the product, by what they are called there."""
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRODUCT):
            yield from ((alias.asname or alias.name, f"{node.module}:{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            yield node.name, f"{source.module}:{node.name}"


def _keys(function: ast.FunctionDef, under: str) -> Iterator[tuple[ast.expr, str]]:
    """Keys of the outermost dictionaries, or of those that are values of the key `under`."""
    level: dict[int, str] = {}  # of dictionaries that are values: their keys
    for node in ast.walk(function):  # what is outside comes first
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            pairs = [(node.targets[0].slice, node.value)]
        for key, value in pairs:
            if isinstance(key, ast.Constant):
                level[id(value)] = str(key.value)
                if level.get(id(node), "") == under:
                    yield key, str(key.value)


def _environment(source: Source) -> Iterator[Use]:
    """Variables that vLLM reads, and its plugin."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ENVIRONMENT.fullmatch(node.value):
            package = "vllm_ascend" if node.value.startswith("VLLM_ASCEND_") else "vllm"
            yield Use(f"{package}.envs:", source.file, node.lineno, literal=node.value)
