"""Python sources inside published wheels, read without downloading or installing these.

A wheel of vLLM has 250 MB, of which a contract needs some fifty files: they are read one by one over HTTP ranges, as
pip itself reads metadata, and kept in a folder. Where pip looks for packages is pip's configuration.
"""

from __future__ import annotations

import os
import zipfile
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import setuptools  # noqa: F401  it replaces distutils, which pip imports: imported later, it would find the wrong one
from pip._internal.cli.cmdoptions import make_target_python
from pip._internal.commands import create_command
from pip._internal.exceptions import PipError
from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, LazyZipOverHTTP
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.requests.exceptions import RequestException

CACHE_VARIABLE = "MINDSPEED_RL_CONTRACT_CACHE"
DEFAULT_CACHE = Path("~/.cache/mindspeed_rl/contract")
# Ascend's hosts: torch-npu is made for Arm first. Python sources do not depend on it.
PYTHON, MACHINE = "3.11", "aarch64"
MEMBERS = "members.txt"
CHUNK = 2**18  # bytes of a request: most files, and some that lie beside them in the wheel


class WheelError(Exception):
    """A wheel is in no registry that can be reached, and what is needed of it is not in the cache.

    Attributes:
        wheel: `name==version`.
    """

    def __init__(self, wheel: str, why: str):
        hint = f"Is the package registry reachable? Else point {CACHE_VARIABLE} to a filled cache."
        super().__init__(f"{wheel}: {why}. {hint}")
        self.wheel = wheel


class Wheel:
    """One version of a package: `vllm==0.11.0`.

    Attributes:
        name: of the package in the registry.
        version: exactly.
    """

    def __init__(self, name: str, version: str):
        self.name, self.version = name, version
        root = Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).expanduser()
        self.folder = root / f"{name}-{version}"

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    @cached_property
    def members(self) -> frozenset[str]:
        """Paths of all its files.

        Raises:
            WheelError: it cannot be read.
        """
        kept = self.folder / MEMBERS
        if not kept.exists():
            _keep(kept, "\n".join(self._archive.namelist()).encode())
        return frozenset(kept.read_text(encoding="utf-8").splitlines())

    @cached_property
    def packages(self) -> frozenset[str]:
        """Names under which it is imported."""
        return frozenset(member.split("/")[0] for member in self.members if "/" in member)

    def path(self, module: str) -> str | None:
        """The file of a dotted module, or None if there is none with a source."""
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in self.members), None)

    def has_folder(self, module: str) -> bool:
        """Whether a module may be imported that is a folder without `__init__.py`."""
        prefix = module.replace(".", "/") + "/"
        return any(member.startswith(prefix) for member in self.members)

    def has_module(self, module: str) -> bool:
        """Whether such a module may be imported, of whatever kind."""
        return bool(self.path(module) or self.compiled(module) or self.has_folder(module))

    def compiled(self, module: str) -> str | None:
        """The extension that a module without a source lies in, or is part of."""
        parts = module.split(".")
        prefixes = ["/".join(parts[:length]) + "." for length in range(len(parts), 0, -1)]
        return next(
            (m for p in prefixes for m in sorted(self.members) if m.startswith(p) and m.endswith(".so")), None
        )

    def source(self, path: str) -> str:
        """Text of one of its files.

        Raises:
            WheelError: it cannot be read.
        """
        kept = self.folder / path
        if not kept.exists():
            try:
                _keep(kept, self._archive.read(path))
            except RequestException as error:
                raise self._unreachable(error) from error
        return kept.read_text(encoding="utf-8")

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        try:
            session, finder = _registry()
            best = finder.find_best_candidate(self.name, SpecifierSet(f"=={self.version}")).best_candidate
            if best is None:
                raise WheelError(str(self), f"pip finds none for Python {PYTHON} on {MACHINE}")
            if best.link.is_file:
                return zipfile.ZipFile(best.link.file_path)
            lazy: Any = LazyZipOverHTTP(best.link.url_without_fragment, session, CHUNK)
            return zipfile.ZipFile(lazy)
        except (PipError, RequestException, HTTPRangeRequestUnsupported) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> WheelError:
        return WheelError(str(self), f"it cannot be read ({type(error).__name__})")


def _keep(path: Path, content: bytes) -> None:
    """Write a file of the cache at once: other test runs may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


@cache
def _registry() -> tuple[Any, Any]:
    """pip's session and its finder of packages, for another machine than this one."""
    command: Any = create_command("install")
    platforms = [f"manylinux_2_{minor}_{MACHINE}" for minor in range(39, 16, -1)] + [f"manylinux2014_{MACHINE}"]
    options, _ = command.parse_args(
        [
            *("--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"),
            *(f"--platform={platform}" for platform in platforms),
        ]
    )
    session = command._build_session(options)
    finder = command._build_package_finder(options, session, make_target_python(options))
    return session, finder
