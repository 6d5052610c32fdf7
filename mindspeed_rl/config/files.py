"""What a configuration says about files: the model's shape, and whether the named paths are there.

Reads small JSON files only; nothing here loads weights or writes.
"""

from __future__ import annotations

import difflib
import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.model import CriticModel, ModelConfig
from mindspeed_rl.config.schema import Config

# A checkpoint of this trainer: `latest` names the newest of a root's, `manifest.json` completes a single one
LATEST, MANIFEST, HF_FOLDER = "latest", "manifest.json", "hf"
Shape = TypeVar("Shape", bound=ModelConfig)


def actor_path(cfg: Config, key: str) -> str:
    """Full path of the section that sets `key` for the actor; where neither does, that of the defaults."""
    section = "actor_config" if key in cfg.actor_config.model_fields_set else "megatron_training"
    return f"{section}.{key}"


def touches(path: str, broken: Sequence[str]) -> bool:
    """Whether `path` is, holds or lies within one of the `broken` paths; `actor.` stands for both its sections."""

    def parts(name: str) -> list[str]:
        section, *rest = name.split(".")
        return ["actor" if section in ("megatron_training", "actor_config") else section, *rest]

    ours = parts(path)
    return any(all(a == b for a, b in zip(ours, parts(name), strict=False)) for name in broken)


def resolve_model(cfg: Config) -> ModelConfig:
    """The actor's shape: the preset that `model` names, or with `auto` that of the checkpoint's config.json.

    Raises:
        ConfigError: the preset is unknown, the config.json missing or unsupported, or they contradict each other.
    """
    path, name = actor_path(cfg, "model"), cfg.actor.model
    if name == "auto":
        stored = checkpoint_model(cfg)
        if stored is None:
            message = f"needs the config.json of a Hugging Face folder, and load = {cfg.actor.load!r} has none"
            raise ConfigError([Violation(path, name, message, "name a preset, or set actor_config.load")])
        return stored
    if name not in cfg.model:
        near = difflib.get_close_matches(name, cfg.model, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"add `- model: {name}` to `defaults`"
        known = ", ".join(cfg.model) or "none"
        raise ConfigError([Violation(path, name, f"no such model preset; `defaults` brought in: {known}", hint)])
    preset, stored = cfg.model[name], checkpoint_model(cfg)
    contradictions = list(_contradictions(cfg, name, preset, stored)) if stored else []
    if contradictions:
        raise ConfigError(contradictions)
    return preset


def checkpoint_model(cfg: Config) -> ModelConfig | None:
    """The shape in the config.json of `load`; None where there is no such file on this machine.

    Raises:
        ConfigError: the file is not JSON or describes a model that is not supported.
    """
    file = _config_json(cfg.actor.load) if cfg.actor.load else None
    if file is None:
        return None
    return _read_shape(file, actor_path(cfg, "load"), cfg.actor.load, ModelConfig)


def resolve_reward_model(cfg: Config) -> CriticModel | None:
    """The reward model's shape; None where there is none, or its config.json is not on this machine.

    Raises:
        ConfigError: the file is not JSON, or describes no sequence classification with one label.
    """
    load = cfg.reward_config.load
    file = Path(load) / "config.json" if load else None
    if file is None or not file.is_file():
        return None
    return _read_shape(file, "reward_config.load", load, CriticModel)


def _read_shape(file: Path, key: str, value: str | None, kind: type[Shape]) -> Shape:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"holds a {type(content).__name__}, not an object")
        return kind.from_hf(content)
    except (ValueError, TypeError) as error:  # not JSON, not supported, or values of a wrong type
        raise ConfigError([Violation(key, value, f"{file}: {error}")]) from error


def _config_json(load: str) -> Path | None:
    """The config.json of a Hugging Face folder, of a checkpoint, or of the newest checkpoint below a root."""
    folders = [Path(load), Path(load) / HF_FOLDER]
    latest = Path(load) / LATEST
    if latest.is_file():
        folders.append(Path(load) / latest.read_text(encoding="utf-8").strip() / HF_FOLDER)
    return next((folder / "config.json" for folder in folders if (folder / "config.json").is_file()), None)


def _contradictions(cfg: Config, name: str, preset: ModelConfig, stored: ModelConfig) -> Iterator[Violation]:
    for key in ModelConfig.model_fields:
        ours, theirs = getattr(preset, key), getattr(stored, key)
        # rope needs no weights: a preset may allow fewer positions than the checkpoint was made for
        if ours == theirs or (key == "max_position_embeddings" and ours < theirs):
            continue
        message = f"contradicts the checkpoint: {key} = {theirs!r} in the config.json of {cfg.actor.load}"
        yield Violation(f"model.{name}.{key}", ours, message, f"set {actor_path(cfg, 'model')} = auto")


def missing_files(cfg: Config, broken: Sequence[str] = ()) -> list[Violation]:
    """Named paths that are not on this machine; keys in `broken` are left out."""
    actor, custom = cfg.actor, cfg.rl_config.custom_reward_function
    data = [(key, path) for key in ("data_path", "val_data_path") for path in _several(getattr(actor, key))]
    named = [
        # a preprocessed data set is named by the common prefix of its files
        *((actor_path(cfg, key), path, "file or prefix", _any_with_prefix(path)) for key, path in data),
        *(
            (actor_path(cfg, key), folder, "folder", Path(folder).is_dir())
            for key, folder in (("tokenizer_name_or_path", actor.tokenizer_name_or_path), ("load", actor.load))
            if folder
        ),
    ]
    if actor.chat_template:
        named.append(
            (actor_path(cfg, "chat_template"), actor.chat_template, "file", Path(actor.chat_template).is_file())
        )
    if dataset := actor.custom_dataset:
        path = f"{actor_path(cfg, 'custom_dataset')}.path"
        named.append((path, dataset.path, "file", Path(dataset.path).is_file()))
    reward = cfg.reward_config
    named += [
        (f"reward_config.{key}", path, kind, Path(path).is_file() if kind == "file" else Path(path).is_dir())
        for key, path, kind in (
            ("load", reward.load, "folder"),
            ("tokenizer_name_or_path", reward.tokenizer_name_or_path, "folder"),
            ("chat_template", reward.chat_template, "file"),
        )
        if path
    ]
    if sampler := actor.custom_sampler:
        path = f"{actor_path(cfg, 'custom_sampler')}.path"
        named.append((path, sampler.path, "file", Path(sampler.path).is_file()))
    if custom:
        named.append(("rl_config.custom_reward_function.path", custom.path, "file", Path(custom.path).is_file()))
    if algorithms := cfg.rl_config.custom_algorithm_file:
        named.append(("rl_config.custom_algorithm_file", algorithms, "file", Path(algorithms).is_file()))
    if tools := cfg.tools_config.tool_file:
        named.append(("tools_config.tool_file", tools, "file", Path(tools).is_file()))
    return [
        Violation(key, path, f"no such {kind}", f"looked for {Path(path).absolute()}")
        for key, path, kind, is_there in named
        if not is_there and not touches(key, broken)
    ]


def unusable_files(cfg: Config, broken: Sequence[str] = ()) -> list[Violation]:
    """Named folders that are on this machine but hold nothing of use; keys in `broken` are left out."""
    found = [*_unusable_tokenizer(cfg), *_unusable_checkpoint(cfg), *_unusable_reward_model(cfg)]
    return [violation for violation in found if not touches(violation.path, broken)]


def _unusable_tokenizer(cfg: Config) -> Iterator[Violation]:
    reward, files = cfg.reward_config, ("tokenizer.json", "tokenizer_config.json")
    named = {
        actor_path(cfg, "tokenizer_name_or_path"): cfg.actor.tokenizer_name_or_path,
        "reward_config.tokenizer_name_or_path": reward.tokenizer_name_or_path,
        "reward_config.load": None if reward.tokenizer_name_or_path else reward.load,
    }
    for key, name in named.items():
        if name and Path(name).is_dir() and not any((Path(name) / file).is_file() for file in files):
            yield Violation(key, name, f"holds neither {' nor '.join(files)}")


def _unusable_checkpoint(cfg: Config) -> Iterator[Violation]:
    load = cfg.actor.load
    if not load or not Path(load).is_dir() or _config_json(load):
        return
    if not any((Path(load) / name).is_file() for name in (LATEST, MANIFEST)):
        message = f"holds neither config.json (Hugging Face) nor {LATEST} (checkpoints of this trainer)"
        yield Violation(actor_path(cfg, "load"), load, message)
    elif cfg.actor.model == "auto":
        message = f"load = {load!r} is a checkpoint without a config.json to read the shape from"
        yield Violation(actor_path(cfg, "model"), "auto", message, "name a preset")


def _unusable_reward_model(cfg: Config) -> Iterator[Violation]:
    load = cfg.reward_config.load
    if load and Path(load).is_dir() and not (Path(load) / "config.json").is_file():
        message = "holds no config.json: a reward model is a Hugging Face folder"
        yield Violation("reward_config.load", load, message)


def _several(paths: str | list[str] | None) -> list[str]:
    return [paths] if isinstance(paths, str) else paths or []


def _any_with_prefix(path: str) -> bool:
    return Path(path).exists() or bool(glob.glob(f"{glob.escape(path)}*"))
