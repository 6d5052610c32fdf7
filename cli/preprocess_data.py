"""Preprocess a named data set: `python cli/preprocess_data.py gsm8k input=train.jsonl output_prefix=data/gsm8k`.

The name is that of a YAML in `configs/datasets`, or a path to one's own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from mindspeed_rl.common.command_line import run_command
from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.compose import shipped_configs, type_violations
from mindspeed_rl.data.preprocess import PreprocessConfig, preprocess


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = argparse.ArgumentParser(prog="preprocess_data", description=__doc__)
    parser.add_argument("name", help="a YAML in configs/datasets (without suffix), or a path to one")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="change a key, such as map_keys.prompt=text"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a wrong configuration, 1 for data that cannot be used."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: _preprocess(args))


def _preprocess(args: argparse.Namespace) -> int:
    file = _find(args.name)
    result = preprocess(_load(file, args.overrides), file.stem)
    dropped = f" ({result.dropped_too_long} too long and dropped)" if result.dropped_too_long else ""
    print(f"{result.file}: {result.rows} rows{dropped}")
    return 0


def _find(name: str) -> Path:
    folder = shipped_configs() / "datasets"
    for candidate in (Path(name), folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise ConfigError([Violation("name", name, "no such data set and no such file", f"known: {known}")])


def _load(file: Path, overrides: Sequence[str]) -> PreprocessConfig:
    for override in overrides:
        if "=" not in override:
            raise ConfigError([Violation("override", override, "must be key=value")])
    try:
        merged = OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist(list(overrides)))
        raw: Any = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([Violation(str(file), list(overrides), f"cannot be read: {error}")]) from error
    if not isinstance(raw, dict):
        raise ConfigError([Violation(str(file), raw, "is not a mapping of keys to values")])
    try:
        return PreprocessConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(list(type_violations(raw, error, PreprocessConfig).values())) from error


if __name__ == "__main__":
    sys.exit(main())
