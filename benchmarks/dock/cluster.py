"""A Ray of the benchmark's own, on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def cluster(store_bytes: int) -> Iterator[None]:
    """Ray with an object store of `store_bytes`, whose workers find this repository.

    What is freed can be used again at once, not up to a second later: iterations of a benchmark follow each other in
    milliseconds, those of a training run in seconds. Else every put would touch fresh pages, which takes many times
    longer than to copy into them, with bare Ray and with the dock alike.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        address="local",
        num_cpus=64,  # counts are for placement: they reserve nothing
        object_store_memory=store_bytes,
        _system_config={"free_objects_period_milliseconds": 0},
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        yield
    finally:
        ray.shutdown()
