"""Where a run starts from: `load`, `finetune`, `resume`, and what each takes along."""

from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.checkpoint.state import CheckpointStore
from mindspeed_rl.common.errors import CheckpointError, ConfigError
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.schema import Config
from mindspeed_rl.trainer.inputs import _check_carried, choose_source, generation_keys
from mindspeed_rl.workers.context import Source


def config(tmp_path: Path, rl: dict[str, Any] | None = None, **actor: Any) -> Config:
    return Config(
        megatron_training={},
        actor_config={"save": str(tmp_path / "save"), **actor},
        rl_config={"mini_batch_size": 32, **(rl or {})},
    )


def save_checkpoint(
    root: Path,
    hf_folder: Path,
    iteration: int,
    start_weights: Path,
    saved: list[str] | None = None,
    **state: Any,
) -> Path:
    layout = derive_layout(config(root.parent))
    store = CheckpointStore(root, hf_folder=hf_folder, layout=layout)
    store.begin(iteration)
    store.write_rank(iteration, 0, [], {})
    trainer = {
        "iteration": iteration,
        "sampler": {"used": 7},
        "kl_controller": {},
        "start_weights": str(start_weights),
        "saved": saved or [],
        **state,
    }
    return store.commit(iteration, trainer)


def test_hugging_face_folder_is_a_new_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    source, state = choose_source(config(tmp_path, load=str(tiny_model_dir)))
    assert source == Source(hf_folder=str(tiny_model_dir), weights=str(tiny_model_dir))
    assert state is None


def test_resume_takes_everything_of_the_newest_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "save", tiny_model_dir, 1, tiny_model_dir)
    newest = save_checkpoint(tmp_path / "save", tiny_model_dir, 2, tiny_model_dir, ["optimizer", "rng"])
    # finetune says how `load` is taken; an interrupted run goes on whole
    source, state = choose_source(config(tmp_path, load=str(tiny_model_dir), resume="auto", finetune=True))
    assert source == Source(str(tiny_model_dir), str(tiny_model_dir), str(newest), load_optim=True, load_rng=True)
    assert state is not None
    assert state["iteration"] == 2
    assert state["sampler"] == {"used": 7}


def test_resume_without_a_checkpoint_starts_from_load(tiny_model_dir: Path, tmp_path: Path) -> None:
    source, state = choose_source(config(tmp_path, load=str(tiny_model_dir), resume="auto"))
    assert (source.state, state) == (None, None)


def test_loading_a_checkpoint_goes_on_and_keeps_the_first_reference(tiny_model_dir: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "old", tiny_model_dir, 3, tiny_model_dir, ["rng"])
    source, state = choose_source(config(tmp_path, load=str(tmp_path / "old"), no_load_optim=True))
    assert source.state == str(checkpoint)
    assert source.weights == str(tiny_model_dir)
    assert (source.load_optim, source.load_rng) == (False, True)
    assert state is not None
    assert state["iteration"] == 3


def test_finetuning_takes_the_weights_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "old", tiny_model_dir, 3, tiny_model_dir)
    source, state = choose_source(config(tmp_path, load=str(tmp_path / "old"), finetune=True))
    assert source == Source(hf_folder=str(checkpoint / "hf"), weights=str(checkpoint))
    assert state is None


def test_the_start_of_a_resumed_run_must_still_be_there(tiny_model_dir: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "old", tiny_model_dir, 3, tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"started from .*gone, which is not there"):
        choose_source(config(tmp_path, load=str(tmp_path / "old")))


@pytest.mark.parametrize("shared", [True, False])
def test_a_critic_goes_on_where_it_was(shared: bool, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Its head is of layers that the critic of another kind does not have."""
    state = {"critic": True, "critic_shares_actor": shared}
    save_checkpoint(tmp_path / "old", tiny_model_dir, 3, tiny_model_dir, ["rng", "optimizer"], **state)

    def goes_on(shares: bool) -> dict[str, Any] | None:
        rl = {"adv_estimator": "gae", "critic_shares_actor": shares}
        return choose_source(config(tmp_path, rl, load=str(tmp_path / "old")))[1]

    assert goes_on(shared) is not None
    with pytest.raises(CheckpointError, match=f"a run with critic_shares_actor = {shared}: .* finetune: true"):
        goes_on(not shared)


@pytest.mark.parametrize(("saved", "key"), [(["rng"], "no_load_optim"), (["optimizer"], "no_load_rng")])
def test_state_that_was_not_saved_is_missed_before_anything_starts(
    saved: list[str], key: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "save", tiny_model_dir, 1, tiny_model_dir, saved)
    settings = {"load": str(tiny_model_dir), "resume": "auto"}
    with pytest.raises(CheckpointError, match=f"set {key}: true"):
        choose_source(config(tmp_path, **settings))
    source, _ = choose_source(config(tmp_path, **settings, **{key: True}))
    assert source.load_optim == ("optimizer" in saved)
    assert source.load_rng == ("rng" in saved)


def test_carried_groups_have_a_baseline_or_need_none() -> None:
    """They were scored in the run that is resumed, with or without a greedy response."""
    remax, rloo, grpo = (
        Config(megatron_training={}, rl_config={"adv_estimator": e}) for e in ("remax", "rloo", "grpo")
    )
    of_remax, of_rloo = ({"carried": 1, "generation_keys": generation_keys(cfg)} for cfg in (remax, rloo))
    _check_carried(of_remax, remax)
    _check_carried(of_rloo, grpo)
    for state, config in ((of_remax, rloo), (of_rloo, remax)):
        with pytest.raises(ConfigError, match=r"rl_config.adv_estimator = .* in the run that is resumed"):
            _check_carried(state, config)
        _check_carried({**state, "carried": 0}, config)


def test_carried_groups_were_scored_as_the_next_ones_will_be() -> None:
    rewards = {"filter_groups_enable": True, "verifier_function": ["acc"], "verifier_weight": [1.0]}
    before, after = (
        Config(megatron_training={}, rl_config={**rewards, "verifier_weight": [weight]}) for weight in (1.0, 0.5)
    )
    state = {"carried": 1, "generation_keys": generation_keys(before)}
    _check_carried(state, before)
    with pytest.raises(ConfigError, match=r"rl_config.verifier_weight = \[0.5\].*was \[1.0\]"):
        _check_carried(state, after)
    # of an older version, which has not written the key
    known = {key: value for key, value in generation_keys(before).items() if key != "rl_config.verifier_weight"}
    _check_carried({"carried": 1, "generation_keys": known}, after)
