"""What every peer's driver is told by `compare.py`: the work, and where its inputs and its result lie."""

from __future__ import annotations

import argparse
from pathlib import Path


def work_parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that all drivers have; `description`: a driver's docstring, of which the first line is shown."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="with model/ and data.jsonl")
    parser.add_argument("--samples", type=int, required=True, help="of each prompt")
    parser.add_argument("--response", type=int, required=True, help="tokens")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--memory", type=float, required=True, help="share of the device for vLLM")
    parser.add_argument("--output", type=Path, required=True)
    return parser
