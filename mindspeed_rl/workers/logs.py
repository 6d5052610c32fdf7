"""Logs of processes on other nodes come to the driver's run folder when a run ends, well or not."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_rl.workers.placement import Node, cluster_nodes

logger = logging.getLogger(__name__)

_SECONDS = 60.0  # a node that does not answer must not hold up the end of a run
_MOST_BYTES = 64 * 2**20  # of one log: its end, which is what one looks for


def collect_logs(source: str, target: str) -> list[str]:
    """Copy the logs that processes on other nodes wrote, each to its own node's disk.

    Args:
        source: their folder, as every node sees it.
        target: where they go on this node. A node that sees this folder itself at `source` shares the disk: there is
            nothing to fetch.

    Returns:
        Names of the files that were fetched.
    """
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in cluster_nodes() if node.id != here]
    for node in others:
        if node.lost is not None:
            logger.warning("node %s is lost, and logs that only its disk held with it", node)
    mark = f".{uuid.uuid4().hex}"
    (Path(target) / mark).touch()
    read = ray.remote(num_cpus=0, max_retries=0)(_read_logs)
    calls: dict[ray.ObjectRef, Node] = {}
    for node in others:
        if node.lost is None:
            there = NodeAffinitySchedulingStrategy(node.id, soft=False)
            calls[read.options(scheduling_strategy=there).remote(source, mark)] = node
    fetched: list[str] = []
    try:
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=_SECONDS) if calls else ([], [])
        for call in late:
            logger.warning("node %s did not send its logs within %g s", calls[call], _SECONDS)
        for call in done:
            try:
                logs = ray.get(call)
            except RayError as error:
                logger.warning("node %s did not send its logs: %s", calls[call], error)
                continue
            for name, content in logs.items():
                (Path(target) / name).write_bytes(content)
                fetched.append(name)
    finally:
        (Path(target) / mark).unlink()
    return fetched


def _read_logs(folder: str, mark: str) -> dict[str, bytes]:
    """Name and content of each log; none where `mark` shows that the reader sees this folder itself."""
    path = Path(folder)
    if (path / mark).exists():
        return {}
    logs = {}
    for log in sorted(path.glob("*.log")):
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _MOST_BYTES))
            logs[log.name] = file.read()
    return logs
