"""What the product uses of its vendors' packages, and where it is: `python -m tests.contract.report`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tests.contract import tables
from tests.contract.check import Result, outcome


def checked(results: Iterable[Result]) -> set[str]:
    """Uses that were looked up and found fit, each once: a symbol with the arguments that we call it with."""
    return {result.use for result in results if result.is_checked and not result.problem}


def npu_symbols_checked() -> int:
    """`npu.contract_symbols_checked`: such uses on the lines that run on NPUs, those of both lines once."""
    found = outcome().results
    return len(set().union(*(checked(found.get(n, ())) for n, line in tables.LINES.items() if line.device == "npu")))


def main(arguments: list[str]) -> int:
    """Print the table; 1 if something is missing that `tables.KNOWN` does not list, or a wheel cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there too")
    options = parser.parse_args(arguments)
    found = outcome()
    rows = [result for results in found.results.values() for result in results]
    for row in rows:
        state = row.problem or ("ok" if row.is_checked else "not looked at")
        print("  ".join((row.line, row.package, row.use, row.where, row.defined or "-", state)))
    print()
    for error in found.unreadable.values():
        print(error)
    for line, results in found.results.items():
        problems = {result.symbol for result in results if result.problem}
        print(f"{line}: {len(checked(results))} fit, {len(problems)} do not")
    print(f"npu.contract_symbols_checked: {npu_symbols_checked()}")
    if options.json:
        record = {"npu.contract_symbols_checked": npu_symbols_checked(), "uses": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return int(bool(found.unreadable) or any(is_unexpected(row) for row in rows))


def is_unexpected(result: Result) -> bool:
    """Whether it has a problem that is not known."""
    return bool(result.problem) and tables.KNOWN.get((result.line, result.symbol)) != result.problem


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
