"""From a configuration name and overrides to a validated `Config`: hydra composes, pydantic checks types, then rules.

Search order of run configurations and model presets: the user's `--config-dir`, then `configs/grpo`, `configs/dapo`,
`configs/ppo`, `configs/sft`, `configs/dpo` and `configs`.
Everything that is wrong is reported in one `ConfigError`: a bad value does not hide a broken rule.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

import mindspeed_rl
from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config import files, rules
from mindspeed_rl.config.schema import Config

_SPELLINGS = ("num_npus", "num_devices")  # two names of one key: an override of either replaces both
_MISSING = "required, but missing"
_TYPE_HINTS = {
    "bool_type": "write true or false",
    "int_type": "write a whole number without quotes",
    "model_type": "write a section: `key: value` lines below it",
}


def load_config(
    config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None, *, files_exist: bool = False
) -> tuple[Config, str]:
    """Compose and validate a run configuration.

    Args:
        config_name: name of a YAML file in one of the search folders, without suffix.
        overrides: `key.path=value`, in hydra's grammar; `+` is never needed.
        config_dir: folder of the user's own run configurations and presets, searched first.
        files_exist: also demand that the data, tokenizer and checkpoint named in the configuration are there.

    Returns:
        The configuration and the composed YAML text, interpolations resolved.

    Raises:
        ConfigError: every violation found.
    """
    text = compose_yaml(config_name, overrides, config_dir)
    return validate(OmegaConf.to_container(OmegaConf.create(text)), files_exist=files_exist), text


def compose_yaml(config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None) -> str:
    """Compose without validating; returns YAML text with interpolations resolved.

    Raises:
        ConfigError: the name is unknown, or hydra cannot read a file or an override.
    """
    folders = _search_folders(config_dir)
    name = config_name.removesuffix(".yaml")
    home = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    if home is None:
        raise ConfigError([_unknown_name(name, folders)])
    search_path = ",".join(f"'file://{folder}'" for folder in folders if folder != home)
    try:
        with initialize_config_dir(config_dir=str(home), version_base="1.3"):
            overrides = _parse_overrides(overrides, folders)
            composed = compose(name, [*overrides, f"hydra.searchpath=[{search_path}]"])
        keys = [override.lstrip("+").partition("=")[0] for override in overrides]
        for key in keys:
            _drop_other_spelling(composed, key, keys)
        unset = sorted(OmegaConf.missing_keys(composed))
        if unset:
            raise ConfigError([Violation(key, "???", "marked as required, but not set") for key in unset])
        return OmegaConf.to_yaml(composed, resolve=True)
    except MissingConfigException as error:
        raise ConfigError([_unknown_default(error)]) from error
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([Violation("--config-name", config_name, f"cannot be composed: {error}")]) from error


def validate(raw: Any, *, files_exist: bool = False) -> Config:
    """Check a composed configuration (a plain dict) against schema and rules.

    Raises:
        ConfigError: all violations. Rules that read a key with a wrong type are left out, the others still run.
    """
    if not isinstance(raw, dict):
        raise ConfigError([Violation("<root>", raw, "a configuration is a mapping of sections")])
    config, violations = _validate_types(raw)
    broken = [violation.path for violation in violations]
    violations += rules.check(config, broken)
    violations += files.unusable_files(config, broken)
    if files_exist:
        violations += files.missing_files(config, broken)
    if violations:
        raise ConfigError(violations)
    return config


def shipped_configs() -> Path:
    """The folder of the configurations that come with the package, or of a checkout."""
    package = Path(mindspeed_rl.__file__).parent
    installed = package / "_configs"  # beside an installed package, `configs` could be anybody's
    return installed if installed.is_dir() else package.parent / "configs"


def _search_folders(config_dir: str | None) -> list[Path]:
    """Folders searched for configurations, first match wins."""
    ours = shipped_configs()
    folders = [ours / "grpo", ours / "dapo", ours / "ppo", ours / "sft", ours / "dpo", ours]
    if config_dir is not None:
        user = Path(config_dir).resolve()
        if not user.is_dir():
            raise ConfigError([Violation("--config-dir", config_dir, "is not a folder")])
        folders.insert(0, user)
    return folders


def _unknown_name(name: str, folders: Sequence[Path]) -> Violation:
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    where = ", ".join(str(folder) for folder in folders)
    return Violation("--config-name", name, f"no such configuration in {where}", hint)


def _unknown_default(error: MissingConfigException) -> Violation:
    name = error.missing_cfg_file or ""
    near = difflib.get_close_matches(name.rpartition("/")[2], error.options or [], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(error.options or [])}"
    return Violation("defaults", name, "no such configuration", hint)


def _parse_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Let plain `key=value` set keys that the YAML does not name; the schema refuses unknown ones afterwards."""
    parser = OverridesParser.create()
    parsed, violations = [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            key, _, value = text.partition("=")
            reason = str(error).splitlines()[0].rstrip(".")
            hint = "write key.path=value; put quotes around special characters: key='\"a=b\"'"
            violations.append(Violation(key, value, f"cannot parse the override: {reason}", hint))
            continue
        if override.is_sweep_override():
            message, hint = "is a choice of values, not one value", "write [a,b] for a list"
            violations.append(Violation(override.key_or_group, text.partition("=")[2], message, hint))
            continue
        if override.is_hydra_override():
            message, hint = "hydra's own settings have no effect here", "use --config-dir to add a search folder"
            violations.append(Violation(override.key_or_group, text.partition("=")[2], message, hint))
            continue
        is_group = any((folder / override.key_or_group).is_dir() for folder in folders)
        parsed.append(f"++{text}" if _is_plain(override) and not is_group else text)
    if violations:
        raise ConfigError(violations)
    return parsed


def _is_plain(override: Override) -> bool:
    return not (override.is_delete() or override.is_add() or override.is_force_add())


def _drop_other_spelling(composed: DictConfig, key: str, overridden: Sequence[str]) -> None:
    """Let an override win over the file's other spelling; where both are overridden, the schema refuses that."""
    parent, _, name = key.rpartition(".")
    if name in _SPELLINGS:
        section = OmegaConf.select(composed, parent) if parent else composed
        with open_dict(section):
            for other in set(_SPELLINGS) - {name}:
                if f"{parent}.{other}" not in overridden:
                    section.pop(other, None)


def put(sections: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`sections`, into which the values went at their key paths."""
    for path, value in values.items():
        *parents, key = path.split(".")
        section = sections
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return sections


def _validate_types(raw: dict[str, Any]) -> tuple[Config, list[Violation]]:
    """Validate; drop each refused value (so that its default stands in) until the rest is a valid `Config`."""
    raw = {"megatron_training": {}, **copy.deepcopy(raw)}
    violations: dict[str, Violation] = {}
    while True:
        try:
            return Config.model_validate(raw), list(violations.values())
        except ValidationError as error:
            for path, violation in type_violations(raw, error, Config).items():
                earlier = violations.setdefault(path, violation)
                if (
                    earlier is not violation and violation.message != _MISSING
                ):  # missing: its refused value was dropped
                    violations[path] = _both_reasons(earlier, violation)
            # all are located before any is dropped: without its key, an error would be located in the whole section
            refused = [(_locate(raw, item["loc"], item["type"]), item["type"]) for item in error.errors()]
        for keys, error_type in refused:
            _drop(raw, keys[: -1 if error_type == "missing" else None])


def type_violations(raw: Any, error: ValidationError, schema: type[BaseModel]) -> dict[str, Violation]:
    """What pydantic found in `raw`, in our words, by key path (that of `raw` itself is empty)."""
    violations: dict[str, Violation] = {}
    for item in error.errors():
        violation = _type_violation(_locate(raw, item["loc"], item["type"]), item, schema)
        earlier = violations.setdefault(violation.path, violation)
        if earlier is not violation:
            violations[violation.path] = _both_reasons(earlier, violation)
    return violations


def _both_reasons(earlier: Violation, later: Violation) -> Violation:
    """Branches of a union: one violation, both reasons."""
    if later.message in earlier.message:
        return earlier
    message = f"{earlier.message}; or: {later.message}"
    return Violation(earlier.path, earlier.value, message, earlier.suggestion)


def _locate(raw: Any, loc: Sequence[str | int], error_type: str) -> list[str | int]:
    """The part of pydantic's location that names keys: it appends branch names of unions, which are not keys."""
    keys: list[str | int] = []
    for key in loc:
        is_key = key in raw if isinstance(raw, dict) else isinstance(raw, list) and isinstance(key, int)
        if not is_key:
            # not there, yet at fault: a key that must be given, or whose default does not go with the others
            absent = error_type == "missing" or (error_type == "value_error" and isinstance(raw, dict))
            return [*keys, key] if absent else keys
        raw = raw[key]
        keys.append(key)
    return keys


def _drop(raw: dict[str, Any], keys: Sequence[str | int]) -> None:
    """Remove the value at `keys`; an item of a list takes the whole list with it, as the rest has shifted meaning."""
    node: Any = raw
    for key in keys[:-1]:
        if not isinstance(node, dict) or key not in node:
            return  # removed with an earlier error
        if isinstance(node[key], list):
            del node[key]
            return
        node = node[key]
    if isinstance(node, dict) and keys:
        node.pop(keys[-1], None)
    raw.setdefault("megatron_training", {})


def _type_violation(keys: Sequence[str | int], item: Any, schema: type[BaseModel]) -> Violation:
    path = ".".join(map(str, keys))
    value = None if item["type"] == "missing" else item["input"]
    if item["type"] == "extra_forbidden":
        return Violation(path, value, "unknown key", _suggest_key(path, schema))
    if item["type"] == "missing":
        return Violation(path, value, _MISSING)
    if item["type"] == "value_error":  # raised by a validator of ours
        return Violation(path, value, str(item["ctx"]["error"]))
    hint = _TYPE_HINTS.get(item["type"])
    if item["type"] == "literal_error":
        near = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", item["ctx"]["expected"]), n=1)
        hint = f"did you mean {near[0]}?" if near else None
    message = "is not a section" if item["type"] == "model_type" else item["msg"].replace("Input should", "should")
    return Violation(path, value, message, hint)


def _suggest_key(path: str, schema: type[BaseModel]) -> str:
    """A near key of the same section, else the place where a key of this name lives."""
    parent, _, key = path.rpartition(".")
    known = [".".join(keys) for keys in schema_keys(schema)]
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.7)
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    if near and not elsewhere:
        return f"did you mean {siblings[near[0]]}?"
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    anywhere = difflib.get_close_matches(key, {name.rpartition(".")[2] for name in known}, n=1, cutoff=0.7)
    if anywhere:
        return f"did you mean {' or '.join(name for name in known if name.rpartition('.')[2] == anywhere[0])}?"
    if schema is not Config:
        return f"known: {', '.join(known)}"
    return "remove it, or see docs/configuration.md for the keys there are"


def schema_keys(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Every key path of the schema, sections before their keys."""
    for name, field in model.model_fields.items():
        yield (name,)
        section = section_of(field.annotation)
        if section is not None:
            for rest in schema_keys(section):
                yield (name, *rest)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The nested section in a field's type (`X` or `X | None`); None for plain values and the preset table."""
    if get_origin(annotation) is dict:
        return None
    candidates = [annotation, *get_args(annotation)]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)
