"""From a validated configuration to a running trainer: Ray, dock, workers, data; and back down again."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.common.logging import setup_logging
from mindspeed_rl.config.layout import Layout
from mindspeed_rl.config.rules_ascend import unfit_for
from mindspeed_rl.config.rules_cluster import without_effect_on
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.data.supervised import SupervisedDataset
from mindspeed_rl.device.base import Device
from mindspeed_rl.device.select import make_device
from mindspeed_rl.metrics.loggers import MetricLogger, make_loggers
from mindspeed_rl.trainer.grpo_trainer import GRPOTrainer
from mindspeed_rl.trainer.inputs import Inputs, prepare, stop_tokens
from mindspeed_rl.trainer.run_folder import RunFolder, default_run_name
from mindspeed_rl.trainer.saver import Saver, Writers
from mindspeed_rl.trainer.source import RunInputs
from mindspeed_rl.trainer.supervised_inputs import SupervisedInputs, prepare_supervised
from mindspeed_rl.trainer.supervised_trainer import SupervisedFleet, SupervisedTrainer
from mindspeed_rl.trainer.trace import Trace
from mindspeed_rl.trainer.validation import Validation
from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock
from mindspeed_rl.workers.fleet import Fleet, make_fleet
from mindspeed_rl.workers.logs import collect_logs
from mindspeed_rl.workers.placement import beside_the_driver
from mindspeed_rl.workers.reward_worker import RewardWorker
from mindspeed_rl.workers.stages import dock_spec

logger = logging.getLogger(__name__)


def run(config: Config, config_yaml: str, config_name: str) -> int:
    """Train as `config` says.

    Raises:
        MindSpeedRLError: bad data, tokenizer, checkpoint or resources, or a worker that failed.
    """
    if config.device != "auto" and not _cluster_address(config):
        make_device(config.device)  # refused here if this machine has no such device
    inputs = prepare_supervised(config) if config.is_supervised else prepare(config)
    if inputs.completed >= config.actor.train_iters:
        print(f"nothing to do: {inputs.source.state} is complete, train_iters = {config.actor.train_iters}")
        return 0
    folder = RunFolder(config.output_dir, config.run_name or default_run_name(config_name), config_yaml)
    setup_logging(folder.logs, "driver")
    logger.info("%s", inputs.layout)
    logger.info("%s", inputs.source)
    what, limit = "prompts", config.rl_config.max_prompt_length
    if isinstance(inputs, SupervisedInputs):
        what, limit = "rows", config.actor.seq_length
    _print_data(what, inputs.dataset, limit)
    if inputs.validation is not None:
        _print_data(f"{what} to validate on", inputs.validation, limit)
    with ExitStack() as stack:
        stack.enter_context(_ray(config, inputs.layout))
        if isinstance(inputs, SupervisedInputs):
            _train_supervised(config, inputs, folder, stack)
        else:
            _train(config, inputs, folder, stack)
    print(f"run folder: {folder.path}")
    return 0


def _print_data(what: str, data: PromptDataset | SupervisedDataset, limit: int) -> None:
    truncated = f", shortened to that: {data.truncated}" if data.truncated else ""
    print(f"{what}: {len(data)}; dropped as longer than {limit} tokens: {data.dropped_too_long}{truncated}")


def _train_supervised(config: Config, inputs: SupervisedInputs, folder: RunFolder, stack: ExitStack) -> None:
    """As `_train`, where responses are given: there is no rollout, nothing scores, and samples need no dock."""
    config, device = _on_device(config, folder, stack)
    fleet = SupervisedFleet(config, inputs.layout, inputs.model, device, folder.logs)
    stack.callback(fleet.kill)
    fleet.start(inputs.source)
    loggers, saver, trace = _outputs(config, inputs, fleet, folder, stack)
    SupervisedTrainer(config, inputs, fleet, saver, loggers, trace).fit()


def _on_device(config: Config, folder: RunFolder, stack: ExitStack) -> tuple[Config, Device]:
    """The device that runs, and the configuration with it; logs of all nodes are fetched when `stack` ends."""
    device = _device(config)
    stack.callback(collect_logs, folder.logs, folder.logs)
    return config.model_copy(update={"device": device.name}), device


def _outputs(
    config: Config, inputs: RunInputs, fleet: Writers, folder: RunFolder, stack: ExitStack
) -> tuple[list[MetricLogger], Saver | None, Trace | None]:
    """Where metrics, checkpoints and spans of time go; `stack` ends it."""
    loggers = make_loggers(config.rl_config, folder.path, config.actor.train_iters)
    for each in loggers:
        stack.callback(each.close)
    trace = Trace(folder.path / "trace.json") if config.trace else None
    if trace is not None:
        stack.callback(trace.close)
    saver = Saver(config, inputs.store, fleet, inputs.source.weights) if inputs.store else None
    if saver is not None:
        stack.push(saver.close)
    return loggers, saver, trace


def _train(config: Config, inputs: Inputs, folder: RunFolder, stack: ExitStack) -> None:
    """Start dock and workers, train, and leave on `stack` what ends them again."""
    config, dock, reward, fleet = _start(config, inputs, folder, stack)
    loggers, saver, trace = _outputs(config, inputs, fleet, folder, stack)
    validation = Validation(config, inputs.validation, fleet, reward) if inputs.validation else None
    GRPOTrainer(config, inputs, fleet, saver, reward, dock, loggers, validation, trace).fit()


def start_validation(config: Config, config_yaml: str, config_name: str, stack: ExitStack) -> tuple[Validation, int]:
    """What `run` starts, for a validation alone; and how many iterations the weights were trained for.

    Raises:
        MindSpeedRLError: as `run`.
    """
    inputs = prepare(config)
    assert inputs.validation is not None, "there is something to validate on"
    _print_data("prompts to validate on", inputs.validation, config.rl_config.max_prompt_length)
    folder = RunFolder(config.output_dir, config.run_name or default_run_name(config_name), config_yaml)
    setup_logging(folder.logs, "driver")
    stack.enter_context(_ray(config, inputs.layout))
    config, _, reward, fleet = _start(config, inputs, folder, stack)
    return Validation(config, inputs.validation, fleet, reward), inputs.completed


def _start(
    config: Config, inputs: Inputs, folder: RunFolder, stack: ExitStack
) -> tuple[Config, RayTransferDock, Any, Fleet]:
    """The configuration with the device that runs, and dock, reward worker and workers, which `stack` ends."""
    layout = inputs.layout
    config, device = _on_device(config, folder, stack)
    cpus = config.rl_config.num_cpus_for_local_task
    # samples' metadata passes by it all the time, and it must not be lost before the driver is
    dock = RayTransferDock.create(dock_spec(config, layout), cpus, strategy=beside_the_driver())
    concurrency = RewardWorker.concurrent_calls(config)
    reward_actor: Any = ray.remote(RewardWorker).options(
        num_cpus=cpus, max_concurrency=concurrency, scheduling_strategy="SPREAD"
    )
    reward = reward_actor.remote(config, layout, inputs.tokenizer, dock, folder.logs)
    stack.callback(_close, reward)
    fleet = make_fleet(config, layout, inputs.model, device, folder.logs)
    stack.callback(fleet.kill)
    fleet.start(dock, inputs.source, stop_tokens(inputs.tokenizer, inputs.source.hf_folder))
    logger.info("%d workers are up on %s", layout.devices, device.name)
    return config, dock, reward, fleet


def _close(reward: Any) -> None:
    """Let the reward worker end its processes; it may be dead, or busy with one that hangs."""
    with suppress(RayActorError, GetTimeoutError):
        ray.get(reward.close.remote(), timeout=5)


def _cluster_address(config: Config) -> str | None:
    return config.ray_address or os.environ.get("RAY_ADDRESS")


@contextmanager
def _ray(config: Config, layout: Layout) -> Iterator[None]:
    """Join the cluster that is named, else start Ray on this machine."""
    address = _cluster_address(config)
    if useless := list(without_effect_on(config, address)):
        raise ConfigError(useless)
    gib, spill = config.ray.object_store_gib, config.ray.spill_folder
    local = int(2 * config.rl_config.num_cpus_for_local_task + 1)
    # on a small machine Ray must not wait for cores: its counts are for placement, they reserve nothing
    cpus = None if address else max(os.cpu_count() or 1, layout.devices + local)
    # a checkout need not be installed
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        ray.init(
            address=address or "local",  # a Ray that happens to run on this machine is joined only if it is named
            num_cpus=cpus,
            runtime_env={"env_vars": {**config.environment, "PYTHONPATH": os.pathsep.join(paths)}},
            include_dashboard=False,
            object_store_memory=int(gib * 2**30) if gib else None,
            object_spilling_directory=os.path.abspath(spill) if spill else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        message = f"no Ray cluster answers there: {error}"
        raise ConfigError([Violation("ray_address", address, message, "null starts Ray on this machine")]) from error
    # a polite end (as from a scheduler) must take the workers along, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        ray.shutdown()


def _device(config: Config) -> Device:
    """The kind of device that runs; `auto` takes what the cluster has."""
    resources = ray.cluster_resources()
    kind = config.device
    if kind == "auto":
        kind = "npu" if resources.get("NPU") else "cuda" if resources.get("GPU") else "cpu"
    if unfit := list(unfit_for(config, kind)):
        raise ConfigError(unfit)
    return make_device(kind, here=False)
