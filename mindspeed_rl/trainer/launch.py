"""From a validated configuration to a running trainer: Ray, dock, workers, data; and back down again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from transformers import PreTrainedTokenizerBase

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import CheckpointStore
from mindspeed_rl.common.errors import CheckpointError, ConfigError, Violation
from mindspeed_rl.common.logging import setup_logging
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import Layout, derive_layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.prompts import load_prompts
from mindspeed_rl.data.tokenizer import check_tokenizer, load_tokenizer
from mindspeed_rl.device.base import Device
from mindspeed_rl.device.select import make_device
from mindspeed_rl.metrics.loggers import make_loggers
from mindspeed_rl.resharding.names import check_hf_names
from mindspeed_rl.rewards.manager import RewardManager
from mindspeed_rl.trainer.grpo_trainer import GRPOTrainer
from mindspeed_rl.trainer.report import StepReport
from mindspeed_rl.trainer.run_folder import RunFolder, default_run_name
from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock
from mindspeed_rl.workers.group import WorkerGroup
from mindspeed_rl.workers.integrated_worker import Source
from mindspeed_rl.workers.reward_worker import RewardWorker
from mindspeed_rl.workers.stages import dock_spec

logger = logging.getLogger(__name__)


def run(config: Config, config_yaml: str, config_name: str) -> int:
    """Train as `config` says.

    Raises:
        MindSpeedRLError: bad data, tokenizer, checkpoint or resources, or a worker that failed.
    """
    actor = config.actor
    model, layout = resolve_model(config), derive_layout(config)
    # everything that can be wrong without a device is found before one is touched
    source, state = _choose_source(config)
    RewardManager(config.rl_config).close()
    if (Path(source.weights) / "config.json").exists():
        check_hf_names(model, HFWeights(source.weights).names)
    tokenizer = load_tokenizer(
        actor.tokenizer_name_or_path or source.hf_folder, config.generate_config.trust_remote_code
    )
    check_tokenizer(tokenizer, model)
    dataset = load_prompts(actor, config.rl_config, tokenizer)
    store = (
        CheckpointStore(actor.save, hf_folder=source.hf_folder, model=model, layout=layout) if actor.save else None
    )

    folder = RunFolder(config.output_dir, config.run_name or default_run_name(config_name), config_yaml)
    setup_logging(folder.logs, "driver")
    logger.info("%s", layout)
    logger.info("%s", source)
    limit = config.rl_config.max_prompt_length
    print(f"prompts: {len(dataset)}; dropped as longer than {limit} tokens: {dataset.dropped_too_long}")
    with ExitStack() as stack:
        stack.enter_context(_ray(config, layout))
        device = _device(config, layout)
        config = config.model_copy(update={"device": device.name})
        cpus = config.rl_config.num_cpus_for_local_task
        dock = RayTransferDock.create(dock_spec(config, layout), num_cpus=cpus)
        reward: Any = ray.remote(RewardWorker).options(num_cpus=cpus, max_concurrency=2)
        reward_worker = reward.remote(config, layout, tokenizer, dock, folder.logs)
        workers = WorkerGroup(config, layout, model, device, folder.logs)
        stack.callback(workers.kill)
        minutes = config.rl_config.start_timeout_minutes
        arguments = (workers.address(), dock, source, _stop_tokens(tokenizer, source.hf_folder))
        workers.run("start", 0, "start", *arguments, timeout_minutes=minutes)
        logger.info("%d workers are up on %s", layout.world, device.name)

        loggers = make_loggers(config.rl_config, folder.path, actor.train_iters)
        for each in loggers:
            stack.callback(each.close)

        def report() -> StepReport:
            return StepReport(config, layout, model)

        trainer = GRPOTrainer(config, layout, dataset, workers, reward_worker, dock, loggers, store, source, report)
        if state is not None:
            trainer.load_state_dict(state)
        trainer.fit()
        ray.get(reward_worker.close.remote())
    print(f"run folder: {folder.path}")
    return 0


def _choose_source(config: Config) -> tuple[Source, dict[str, Any] | None]:
    """Weights and state to start from, and the driver's state if the run goes on from a checkpoint."""
    actor = config.actor
    assert actor.load is not None, "checked by the configuration's rules"
    newest = CheckpointStore(actor.save).latest() if actor.save and actor.resume == "auto" else None
    load_is_hf = os.path.exists(os.path.join(actor.load, "config.json"))
    if newest is None and load_is_hf:
        return Source(hf_folder=actor.load, weights=actor.load), None
    checkpoint = newest or CheckpointStore.find(actor.load)
    hf_folder = actor.load if load_is_hf else str(Path(checkpoint) / "hf")
    if newest is None and actor.finetune:
        return Source(hf_folder=hf_folder, weights=str(checkpoint)), None
    state = CheckpointStore.load_trainer(checkpoint)
    if state.get("weights_only"):  # converted from a Hugging Face folder: there is no run to go on with
        return Source(hf_folder=hf_folder, weights=str(checkpoint)), None
    # the reference is what the run once started from, not the checkpoint
    start = state["start_weights"]
    if not os.path.exists(start):
        raise CheckpointError(
            f"{checkpoint} goes on from a run that started from {start}, which is not there any more"
        )
    resuming = newest is not None
    return (
        Source(
            hf_folder=hf_folder,
            weights=start,
            state=str(checkpoint),
            load_optim=resuming or not actor.no_load_optim,
            load_rng=resuming or not actor.no_load_rng,
        ),
        state,
    )


@contextmanager
def _ray(config: Config, layout: Layout) -> Iterator[None]:
    """Join the cluster that is named, else start Ray on this machine."""
    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    local = int(2 * config.rl_config.num_cpus_for_local_task + 1)
    # on a small machine Ray must not wait for cores: its counts are for placement, they reserve nothing
    cpus = None if address else max(os.cpu_count() or 1, layout.world + local)
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        address=address or "local",  # a Ray that happens to run on this machine is joined only if it is named
        num_cpus=cpus,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},  # a checkout need not be installed
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _device(config: Config, layout: Layout) -> Device:
    """The kind of device that runs; `auto` takes what the cluster has."""
    resources = ray.cluster_resources()
    kind = config.device
    if kind == "auto":
        kind = "npu" if resources.get("NPU") else "cuda" if resources.get("GPU") else "cpu"
    device = make_device(kind, here=False)
    found = resources.get(device.ray_resource, 0) if device.ray_resource else layout.world
    if found < layout.world:
        message = f"the cluster has {found:g} {device.ray_resource} devices"
        raise ConfigError(
            [Violation("rl_config.actor_resource.num_npus", layout.world, message, "use fewer, or add nodes")]
        )
    return device


def _stop_tokens(tokenizer: PreTrainedTokenizerBase, hf_folder: str) -> list[int]:
    """Ids that end a response: the tokenizer's, and those of the model's generation settings."""
    stops = {tokenizer.eos_token_id}
    path = Path(hf_folder) / "generation_config.json"
    if path.exists():
        configured = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") or []
        stops |= set(configured if isinstance(configured, list) else [configured])
    return sorted(stop for stop in stops if stop is not None)
