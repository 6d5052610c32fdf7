"""What a run starts from or goes on from, and where its checkpoints go."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.hf import HFWeights, is_hf_folder
from mindspeed_rl.checkpoint.state import CheckpointReader, CheckpointStore
from mindspeed_rl.common.errors import CheckpointError, ConfigError, Violation
from mindspeed_rl.config.files import HF_FOLDER
from mindspeed_rl.config.layout import Layout, shares_critic, uses_critic
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.config.supervised import STAGES as SUPERVISED_STAGES
from mindspeed_rl.data.sampler import Sampler
from mindspeed_rl.resharding.names import check_hf_names
from mindspeed_rl.workers.context import Source


def _check_writable(key: str, folder: str) -> None:
    """Now, and not when the first checkpoint is due."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError([Violation(key, folder, f"cannot be written to: {error.strerror}")]) from error


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What is found of every run, whatever it learns from."""

    model: ModelConfig
    layout: Layout
    source: Source
    state: dict[str, Any] | None  # the driver's state in the checkpoint that the run goes on from
    sampler: Sampler  # at the position where the run goes on
    store: CheckpointStore | None

    @property
    def completed(self) -> int:
        """Iterations that are done already."""
        return self.state["iteration"] if self.state else 0


def check_weights(model: ModelConfig, source: Source) -> None:
    """What a run starts from and goes on from are of `model`.

    Raises:
        CheckpointError: a weight is missing, or one too many.
    """
    for folder in filter(None, {source.weights, source.state}):
        names = HFWeights(folder).names if is_hf_folder(folder) else CheckpointReader(folder).weight_names
        check_hf_names(model, names)


def checkpoint_store(config: Config, source: Source, model: ModelConfig, layout: Layout) -> CheckpointStore | None:
    """Where checkpoints go, if anywhere; both this and the place of run folders can be written to.

    Raises:
        ConfigError: they cannot.
    """
    save = config.actor.save
    if save:
        _check_writable("actor_config.save", save)
    _check_writable("output_dir", config.output_dir)
    return CheckpointStore(save, hf_folder=source.hf_folder, model=model, layout=layout) if save else None


def choose_source(config: Config) -> tuple[Source, dict[str, Any] | None]:
    """Weights and state to start from, and the driver's state if the run goes on from a checkpoint."""
    actor = config.actor
    assert actor.load is not None, "checked by the configuration's rules"
    newest = CheckpointStore(actor.save).latest() if actor.save and actor.resume == "auto" else None
    load_is_hf = is_hf_folder(actor.load)
    if newest is None and load_is_hf:
        return Source(hf_folder=actor.load, weights=actor.load), None
    checkpoint = newest or CheckpointStore.find(actor.load)
    hf_folder = actor.load if load_is_hf else str(Path(checkpoint) / HF_FOLDER)
    if newest is None and actor.finetune:
        if CheckpointStore.load_trainer(checkpoint).get("lora"):
            message = f"{checkpoint} holds adapters, no weights to start from: make a folder of both with"
            raise CheckpointError(f"{message} cli/convert_checkpoint.py --direction mcore2hf, and load that")
        return Source(hf_folder=hf_folder, weights=str(checkpoint)), None
    state = CheckpointStore.load_trainer(checkpoint)
    if state.get("weights_only"):  # converted from a Hugging Face folder: there is no run to go on with
        return Source(hf_folder=hf_folder, weights=str(checkpoint)), None
    made_by = state.get("stage", "ray_grpo")
    if (made_by in SUPERVISED_STAGES or config.is_supervised) and made_by != actor.stage:
        message = f"is of a run with stage = {made_by!r}, this one has {actor.stage!r}"
        raise CheckpointError(f"{checkpoint} {message}: set finetune: true to start from its weights")
    # the reference is what the run once started from, not the checkpoint
    start = state["start_weights"]
    if not os.path.exists(start):
        raise CheckpointError(
            f"{checkpoint} goes on from a run that started from {start}, which is not there any more"
        )
    if uses_critic(config) and not state.get("critic"):
        message = f"{checkpoint} is of a run without a critic: a new run from its weights has load and finetune: true"
        raise CheckpointError(message)
    shared = state.get("critic_shares_actor", False)
    if uses_critic(config) and shared != shares_critic(config):
        message = f"is of a run with critic_shares_actor = {shared}: a new run from its weights has finetune: true"
        raise CheckpointError(f"{checkpoint} {message}")
    if state.get("lora") != actor.lora_settings:
        trained, trains = (_adapters(settings) for settings in (state.get("lora"), actor.lora_settings))
        raise CheckpointError(
            f"{checkpoint} is of a run with {trained}, and this one has {trains}: keep them to go on"
        )
    for part, wanted, key in (
        ("optimizer", not actor.no_load_optim, "no_load_optim"),
        ("rng", not actor.no_load_rng, "no_load_rng"),
    ):
        if wanted and part not in state["saved"]:
            raise CheckpointError(f"{checkpoint} was saved without {part} state: set {key}: true to go on without it")
    source = Source(
        hf_folder=hf_folder,
        weights=start,
        state=str(checkpoint),
        load_optim=not actor.no_load_optim,
        load_rng=not actor.no_load_rng,
    )
    return source, state


def _adapters(settings: dict[str, Any] | None) -> str:
    """What `lora_settings` say, for messages."""
    if settings is None:
        return "lora_r = 0"
    modules = ", ".join(settings["target_modules"])
    return f"lora_r = {settings['r']}, lora_alpha = {settings['alpha']:g}, lora_target_modules = [{modules}]"
