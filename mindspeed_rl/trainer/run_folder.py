"""The folder of a run: configuration, versions, logs and metrics."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from mindspeed_rl.common.versions import package_versions


class RunFolder:
    """Creates `output_dir/name` and points `output_dir/latest` at it; a taken name gets a number.

    Args:
        output_dir: parent folder.
        name: of the run.
        config_yaml: the resolved configuration, kept as `config.yaml`.
    """

    def __init__(self, output_dir: str, name: str, config_yaml: str):
        parent = Path(output_dir)
        parent.mkdir(parents=True, exist_ok=True)
        self.path = self._create(parent, name)
        (self.path / "config.yaml").write_text(config_yaml, encoding="utf-8")
        (self.path / "versions.json").write_text(json.dumps(package_versions(), indent=2), encoding="utf-8")
        _point(parent / "latest", self.path.name)

    @staticmethod
    def _create(parent: Path, name: str) -> Path:
        for number in range(1, 10_000):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
        raise FileExistsError(f"{parent} holds too many runs named {name}")

    @property
    def logs(self) -> str:
        """Folder of the processes' logs."""
        return str(self.path.absolute() / "logs")


def default_run_name(config_name: str) -> str:
    """Configuration and local time."""
    return f"{config_name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _point(link: Path, target: str) -> None:
    """Replace the symbolic link in one step, so that it always points at a run."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    os.replace(temporary, link)
