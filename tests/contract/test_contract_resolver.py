"""The contract tests' own parts, on sources of a few lines: what they find, and what they report."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contract import tables
from tests.contract.check import calls_of, check
from tests.contract.signatures import Call, of_function
from tests.contract.symbols import OPERATORS, Library, MissingSymbol
from tests.contract.uses import Product, Use
from tests.contract.wheels import CACHE_VARIABLE, MEMBERS, Wheel, WheelError

SOURCES = {
    "megatron/core/__init__.py": (
        "from .deep import Model as Net, helper\nfrom .stars import *\nimport megatron.core.deep\n"
    ),
    "megatron/core/deep.py": (
        "from torch.nn import Module\n"
        "class Base(Module):\n"
        "    def __init__(self, config, *, size=1):\n"
        "        self.config = config\n"
        "        self.register_buffer('bias', None)\n"
        "    @staticmethod\n"
        "    def make(name): ...\n"
        "class Model(Base):\n"
        "    def forward(self, hidden, mask=None): ...\n"
        "try:\n"
        "    from fast import helper\n"
        "except ImportError:\n"
        "    def helper(left, right): ...\n"
    ),
    "megatron/core/stars.py": "__all__ = ['shown']\ndef shown(): ...\ndef hidden(): ...\n",
    "vllm/__init__.py": (
        "import typing\n"
        "MODULE_ATTRS = {'LLM': '.entry:LLM', 'Registry': '.entry:Registry'}\n"
        "if typing.TYPE_CHECKING:\n"
        "    from .entry import Typing\n"
        "def __getattr__(name): ...\n"
    ),
    "vllm/entry.py": (
        "import msgspec\n"
        "from dataclasses import dataclass, field\n"
        "from typing import ClassVar\n"
        "class LLM:\n"
        "    def __init__(self, model, **kwargs): ...\n"
        "class _Registry:\n"
        "    def register(self, name, kind): ...\n"
        "Registry = _Registry()\n"
        "@dataclass\n"
        "class Options:\n"
        "    known: ClassVar[int] = 0\n"
        "    name: str\n"
        "    size: int = field(default=1)\n"
        "    made: int = field(init=False)\n"
        "@dataclass\n"
        "class More(Options):\n"
        "    extra: int = 2\n"
        "class Struct(msgspec.Struct):\n"
        "    top: int = 1\n"
    ),
    "torch_npu/__init__.py": "",
    OPERATORS: "custom:\n- func: npu_norm(Tensor self, Tensor? gamma=None, float epsilon=1e-06) -> (Tensor)\n",
    "torch_npu/_C.cpython-311.so": "",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Of a wheel that lies whole in the cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    for path, source in {**SOURCES, MEMBERS: "\n".join(SOURCES)}.items():
        file = tmp_path / "tiny-1" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return Library([Wheel("tiny", "1")])


@pytest.mark.parametrize(
    ("symbol", "place"),
    [
        ("megatron.core:Net", "megatron/core/deep.py:8"),  # re-export under another name
        ("megatron.core:Net.forward", "megatron/core/deep.py:9"),
        ("megatron.core:Net.config", "megatron/core/deep.py:4"),  # set in a base's method
        ("megatron.core:Net.bias", "megatron/core/deep.py:5"),
        ("megatron.core:helper", "megatron/core/deep.py:13"),  # the alternative that is in the wheel
        ("megatron.core:shown", "megatron/core/stars.py:2"),
        ("megatron.core:deep.Base.make", "megatron/core/deep.py:7"),
        ("vllm:LLM", "vllm/entry.py:4"),  # by a module's __getattr__
        ("vllm:Registry.register", "vllm/entry.py:7"),  # of an instance
        ("torch_npu:npu_norm", f"{OPERATORS}:2"),
    ],
)
def test_definition_is_found(library: Library, symbol: str, place: str) -> None:
    found = library.find(symbol)
    assert f"{found.path}:{found.line}" == place


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("megatron.core.gone:name", "there is no module megatron.core.gone"),
        ("megatron.core:gone", "megatron.core has no gone"),
        ("megatron.core:hidden", "megatron.core has no hidden"),  # not in __all__
        ("megatron.core:Net.gone", "megatron.core.Net has no gone"),  # neither in the wheel nor in torch.nn.Module
        ("vllm:Typing", "vllm has no Typing"),  # only a type checker sees it
        ("torch_npu:npu_gone", "torch_npu has no npu_gone"),
    ],
)
def test_missing_symbol_is_reported(library: Library, symbol: str, message: str) -> None:
    with pytest.raises(MissingSymbol, match=message):
        library.find(symbol)


def test_base_outside_the_wheel_is_looked_up(library: Library) -> None:
    assert library.find("megatron.core:Net.named_parameters").kind == "outside"


def test_compiled_code_is_not_looked_at(library: Library) -> None:
    found = library.find("torch_npu._C:Anything.at_all")
    assert (found.kind, found.path) == ("outside", "torch_npu/_C.cpython-311.so")


@pytest.mark.parametrize(
    ("symbol", "call", "problem"),
    [
        ("megatron.core:Net", Call(1, ("size",)), ""),
        ("megatron.core:Net", Call(2), "takes 1 positional arguments, not 2"),
        ("megatron.core:Net", Call(1, ("width",)), "has no parameter width"),
        ("megatron.core:Net", Call(0, ("size",)), "needs config"),
        ("megatron.core:Net", Call(0, ("size",), is_open=True), ""),  # there may be more arguments
        ("megatron.core:Net.forward", Call(1, ("hidden",)), "gets hidden twice"),
        ("megatron.core:deep.Base.make", Call(1), ""),  # static
        ("vllm:LLM", Call(0, ("model", "anything")), ""),
        ("vllm:Registry.register", Call(1), "needs kind"),
        ("vllm.entry:More", Call(0, ("name", "extra")), ""),
        ("vllm.entry:More", Call(0, ("name", "made")), "has no parameter made"),
        ("vllm.entry:More", Call(0, ("known",)), "has no parameter known; needs name"),
        ("vllm.entry:Struct", Call(0, ("top", "low")), "has no parameter low"),
        ("torch_npu:npu_norm", Call(2, ("eps",)), "has no parameter eps"),
        ("megatron.core:gone | megatron.core:helper", Call(2), ""),  # one of them
        ("megatron.core:gone", Call(0), "megatron.core has no gone"),
    ],
)
def test_call_is_checked(library: Library, symbol: str, call: Call, problem: str) -> None:
    assert check(library, symbol, Use(symbol, "ours.py", 1, call))[1] == problem


def test_value_is_looked_for(library: Library) -> None:
    assert check(library, "megatron.core.stars:", Use("", "", 1, literal="shown"))[1] == ""
    assert "has no value 'gone'" in check(library, "megatron.core.stars:", Use("", "", 1, literal="gone"))[1]


def test_calls_of_a_vendor_must_fit_ours() -> None:
    tree = ast.parse("build_module(s.norm, 1, eps=2)\napply_module(s.norm)(3)\ns.norm(config=4)")
    assert list(calls_of(tree, "s.norm")) == [(1, Call(1, ("eps",))), (2, Call(1)), (3, Call(0, ("config",)))]
    (ours,) = ast.parse("def norm(self, hidden, eps=0): ...").body
    assert isinstance(ours, ast.FunctionDef)
    assert of_function(ours, is_bound=True).objections(Call(0, ("config",))) == [
        "has no parameter config",
        "needs hidden",
    ]


def test_uses_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("OBJECTS", "CALLABLES", "KEYS", "ATTRIBUTES", "LITERALS", "CALLED"):
        monkeypatch.setattr(tables, table, {} if table in ("OBJECTS", "CALLABLES") else ())
    monkeypatch.setattr(tables, "OBJECTS", {"ours.py": {"net": "megatron.core:Net", "gone": "megatron.core:Gone"}})
    (tmp_path / "ours.py").write_text(
        "from megatron.core import Net, parallel as mpu\n"
        "class Ours(Net):\n"
        "    def forward(self, hidden):\n"
        "        return super().forward(hidden, mask=self.mask)\n"
        "    def mine(self): return self.own\n"
        "    def __init__(self, *args):\n"
        "        super().__init__(*args)\n"
        "        self.own = mpu.rank(0)\n"
        "net = Ours(1)\n"
        "net.train(mode='VLLM_FLAG').mine()\n",
        encoding="utf-8",
    )
    product = Product(tmp_path)
    found = {(use.symbol, str(use.call or ""), use.line) for use in product.uses}
    assert found == {
        ("megatron.core:Net", "", 1),
        ("megatron.core:parallel", "", 1),
        ("megatron.core:Net.forward", "", 3),  # overridden
        ("megatron.core:Net.forward", "(_, mask=)", 4),
        ("megatron.core:Net.mask", "", 4),  # not our own
        ("megatron.core:Net.__init__", "", 6),
        ("megatron.core:Net.__init__", "(…)", 7),
        ("megatron.core:parallel.rank", "(_)", 8),
        ("megatron.core:Net.train", "(mode=)", 10),
        ("vllm.envs:", "", 10),
    }
    assert product.unused == {("ours.py", "gone")}


def test_wheel_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(WheelError, match=r"no-such-vendor-package==1: pip finds none .*" + CACHE_VARIABLE):
        assert Wheel("no-such-vendor-package", "1").members
