"""One log file for each process of a run."""

from __future__ import annotations

import logging
import os
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(folder: str, name: str, capture: bool = False) -> None:
    """Write this process's log to `folder/name.log`.

    Args:
        folder: created if it does not exist.
        name: name of the file.
        capture: send stdout and stderr of this process, and of libraries in it, to the file, too.
    """
    os.makedirs(folder, exist_ok=True)
    handler = logging.FileHandler(os.path.join(folder, f"{name}.log"), encoding="utf-8")
    logging.basicConfig(level=logging.INFO, format=FORMAT, handlers=[handler], force=True)
    if capture:
        log = os.open(handler.baseFilename, os.O_WRONLY | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log, stream.fileno())
        os.close(log)
