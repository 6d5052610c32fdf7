"""Everything that a run of SFT or DPO reads, found and checked before a device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_rl.checkpoint.state import CheckpointStore
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import Layout, derive_layout
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.sampler import Sampler, make_sampler
from mindspeed_rl.data.supervised import SupervisedDataset, load_supervised
from mindspeed_rl.data.tokenizer import actor_tokenizer, check_tokenizer
from mindspeed_rl.trainer.source import check_weights, checkpoint_store, choose_source
from mindspeed_rl.workers.context import Source


@dataclass(frozen=True)
class SupervisedInputs:
    """What `prepare_supervised` found."""

    model: ModelConfig
    layout: Layout
    source: Source
    state: dict[str, Any] | None  # the driver's state in the checkpoint that the run goes on from
    dataset: SupervisedDataset
    sampler: Sampler  # at the position where the run goes on
    validation: SupervisedDataset | None  # what to validate on, if anything
    store: CheckpointStore | None

    @property
    def completed(self) -> int:
        """Iterations that are done already."""
        return self.state["iteration"] if self.state else 0


def prepare_supervised(config: Config) -> SupervisedInputs:
    """Open and check what the configuration names.

    Raises:
        MindSpeedRLError: weights, checkpoint, tokenizer or data cannot be used, or a folder not written.
    """
    actor, model, layout = config.actor, resolve_model(config), derive_layout(config)
    source, state = choose_source(config)
    check_weights(model, source)
    tokenizer = actor_tokenizer(config, source.hf_folder)
    check_tokenizer(tokenizer, model)
    dataset = load_supervised(actor, config, tokenizer)
    validation = None
    if actor.val_data_path is not None:
        validation = load_supervised(actor.of_validation(), config, tokenizer, "val_data_path")
    sampler = make_sampler(actor, dataset.row_sources)
    if state is not None:
        sampler.load_state_dict(state["sampler"])
    return SupervisedInputs(
        model, layout, source, state, dataset, sampler, validation, checkpoint_store(config, source, model, layout)
    )
