"""Everything that the product uses of its vendors' packages is in the published wheels, and takes what we give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import tables
from tests.contract.check import Result, outcome
from tests.contract.report import is_unexpected, npu_symbols_checked
from tests.contract.uses import PRODUCT, ROOT

WHEELS = sorted({f"{name}=={version}" for line in tables.LINES.values() for name, version in line.wheels.items()})


def _results_of(*lines: str) -> list[Result]:
    """Skips if there are none, as one failure for each wheel is enough."""
    found = outcome().results
    if any(line not in found for line in lines):
        pytest.skip("a wheel cannot be read, which test_wheel_can_be_read reports")
    return [result for line in lines for result in found[line]]


@pytest.mark.parametrize("wheel", WHEELS)
def test_wheel_can_be_read(wheel: str) -> None:
    error = outcome().unreadable.get(wheel)
    assert error is None, str(error)


@pytest.mark.parametrize(("line", "package"), [(n, p) for n, line in tables.LINES.items() for p in line.wheels])
def test_what_we_use_is_there(line: str, package: str) -> None:
    of_package = [result for result in _results_of(line) if result.package == package]
    problems = [str(result) for result in of_package if is_unexpected(result)]
    assert of_package, "the product uses every package of the line"
    assert not problems, f"{len(problems)} of {len(of_package)} uses do not fit:\n" + "\n".join(problems)


@pytest.mark.parametrize("known", tables.KNOWN)
def test_known_problem_is_still_there(known: tuple[str, str]) -> None:
    line, symbol = known
    problems = {result.problem for result in _results_of(line) if result.symbol == symbol}
    assert tables.KNOWN[known] in problems, "it is solved: remove it from KNOWN in tests/contract/tables.py"


def test_tables_name_places_that_the_product_has() -> None:
    assert not outcome().stale, "expressions in OBJECTS or CALLABLES that are in no such file"
    missing = [file for file in tables.DEVICES if not (ROOT / PRODUCT / file).exists()]
    assert not missing


def test_guarded_symbols_are_somewhere() -> None:
    found = {result.symbol for result in _results_of(*tables.LINES)}
    assert found >= tables.GUARDED, "no version has it: what is it asked for?"


@pytest.mark.parametrize(
    ("line", "lock"), [("stable", "npu"), ("newest", "npu_newest"), ("cuda", "cuda"), ("cpu", "cpu")]
)
def test_versions_are_those_that_users_install(line: str, lock: str) -> None:
    text = Path(ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    missing = [f"{n}=={version}" for n, version in tables.LINES[line].wheels.items() if f"{n}=={version}" not in text]
    assert not missing


def test_enough_is_collected() -> None:
    """A collector that finds nothing would find nothing missing."""
    _results_of(*tables.LINES)
    assert npu_symbols_checked() >= 300
