"""Everything that a run of SFT or DPO reads, found and checked before a device is touched."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.sampler import make_sampler
from mindspeed_rl.data.supervised import SupervisedDataset, load_supervised
from mindspeed_rl.data.tokenizer import actor_tokenizer, check_tokenizer
from mindspeed_rl.trainer.source import RunInputs, check_weights, checkpoint_store, choose_source


@dataclass(frozen=True, kw_only=True)
class SupervisedInputs(RunInputs):
    """What `prepare_supervised` found."""

    dataset: SupervisedDataset
    validation: SupervisedDataset | None  # what to validate on, if anything


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
        model=model,
        layout=layout,
        source=source,
        state=state,
        sampler=sampler,
        store=checkpoint_store(config, source, model, layout),
        dataset=dataset,
        validation=validation,
    )
