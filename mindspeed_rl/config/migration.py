"""Run configurations of MindSpeed RL, verl and RLinf in our keys, by the tables of configs/migration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.compose import load_config, put, schema_keys, shipped_configs
from mindspeed_rl.config.migration_values import CONVERTERS, ByHand, Values, implied
from mindspeed_rl.config.schema import Config

PROJECTS = ("mindspeed_rl", "verl", "rlinf")
# what RLinf's configurations compute with
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "not": lambda a: not a,
}
_CRITIC = "critic."
_ACTORS, _MODELS = ("actor_rollout_ref", "actor_rollout_ref.actor"), ("actor_config.", "megatron_training.")
_WITHOUT_EFFECT = "has no effect"  # how our rules call what is not read
_SECTION_ORDER = ("defaults", "device", "run_name", "output_dir", "megatron_training", "actor_config")


@dataclass(frozen=True)
class Left:
    """A key of theirs that is not in the result, and why."""

    path: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.path} = {self.value!r}: {self.reason}"


@dataclass
class Migration:
    """What became of a configuration.

    Attributes:
        values: our key path -> value, in the order in which they were found.
        comments: our key path -> lines of comments above it, and the one behind it, without #.
        left: keys of theirs that have no counterpart, or need a decision.
        violations: what our rules say about the result.
    """

    values: Values = field(default_factory=dict)
    comments: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def to_yaml(self) -> str:
        """The run configuration."""
        tree = put({}, self.values)
        names = [*(name for name in _SECTION_ORDER if name in tree), *(n for n in tree if n not in _SECTION_ORDER)]
        lines = [line for name in names for line in self._lines(name, name, tree[name], 0)]
        return "\n".join(lines) + "\n"

    def _lines(self, path: str, key: str, value: Any, depth: int) -> Iterator[str]:
        indent = "  " * depth
        above, behind = self.comments.get(path, ([], ""))
        yield from (f"{indent}# {line}".rstrip() for line in above)
        tail = f" # {behind}" if behind else ""
        if path not in self.values:  # a section
            yield f"{indent}{key}:{tail}"
            for name, inner in value.items():
                yield from self._lines(f"{path}.{name}", name, inner, depth + 1)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield f"{indent}{key}:{tail}"
            yield from (f"{indent}  - {_flow(item).strip('{}')}" for item in value)
        else:
            yield f"{indent}{key}: {_flow(value)}{tail}"


def migrate(project: str, text: str, overrides: Sequence[str] = ()) -> Migration:
    """Convert a configuration: its YAML text, and `key.path=value` as on their command lines.

    What it does not say has our defaults, not theirs: best is their composed configuration.

    Raises:
        ConfigError: the text or an override cannot be read.
    """
    theirs = _read(project, text, overrides)
    comments = _comments(text)
    found = Migration()
    for path, entry in _in_order_of_table(project, theirs):
        value = theirs[path]
        if value is None or value == {}:  # nothing is said
            continue
        if entry is None:
            found.left.append(Left(path, value, f"is no key of the reference of {project}"))
            continue
        if "refused" in entry:
            found.left.append(Left(path, value, entry["refused"]))
            continue
        try:
            converted = _convert(path, entry, value, theirs)
        except ByHand as reason:
            found.left.append(Left(path, value, f"{reason} (ours: {', '.join(_ours(entry))})"))
            continue
        except (TypeError, ValueError, ArithmeticError) as error:  # converters reckon with what a user wrote
            found.left.append(Left(path, value, f"cannot be converted: {error} (ours: {', '.join(_ours(entry))})"))
            continue
        for ours, new in converted.items():
            _put(found, ours, new, Left(path, value, f"{ours} is {found.values.get(ours)!r} already, by another key"))
        if converted and path in comments:
            found.comments.setdefault(next(iter(converted)), comments[path])
    for ours, new in implied(project, theirs, found.values).items():
        found.values.setdefault(ours, new)
    _check(found)
    return found


def table(project: str) -> dict[str, dict[str, Any]]:
    """Their keys -> `ours`, `convert` and `note`, or `refused`."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load(
        (shipped_configs() / "migration" / f"{project}.yaml").read_text(encoding="utf-8")
    )
    return entries


def _ours(entry: Mapping[str, Any]) -> list[str]:
    ours = entry["ours"]
    return [ours] if isinstance(ours, str) else list(ours)


def _convert(path: str, entry: Mapping[str, Any], value: Any, theirs: Values) -> Values:
    ours, name = _ours(entry), entry.get("convert")
    if not path.startswith(_CRITIC):
        return CONVERTERS[name](value, theirs, ours) if name else dict.fromkeys(ours, value)
    # a critic's keys are the actor's, in a section of its own
    of_critic = {key.removeprefix(_CRITIC): said for key, said in theirs.items() if key.startswith(_CRITIC)}
    beside = {f"{actor}.{key}": said for key, said in of_critic.items() for actor in _ACTORS}
    converted = CONVERTERS[name](value, {**theirs, **beside}, ours) if name else dict.fromkeys(ours, value)
    of_models = {key.partition(".")[2]: new for key, new in converted.items() if key.startswith(_MODELS)}
    if converted and not of_models:
        raise ByHand("is one key for actor and critic")
    return {f"critic_config.{key}": new for key, new in of_models.items() if key != "tokenizer_name_or_path"}


def _put(found: Migration, ours: str, value: Any, otherwise: Left) -> None:
    if found.values.setdefault(ours, value) != value:
        found.left.append(otherwise)


# ---- reading -----------------------------------------------------------------------------------------------------


def _read(project: str, text: str, overrides: Sequence[str]) -> Values:
    """Their values by key path, interpolations resolved."""
    if unreadable := [override for override in overrides if "=" not in override]:
        message = "cannot be read"
        raise ConfigError([Violation(each, None, message, "write key.path=value") for each in unreadable])
    for name, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        root = OmegaConf.create(text or "{}")
        if not OmegaConf.is_dict(root):
            raise ConfigError([Violation("--input", text[:40], "a configuration is a mapping of sections")])
        changes = OmegaConf.from_dotlist([override.lstrip("+") for override in overrides])
        tree: Any = OmegaConf.to_container(OmegaConf.merge(root, changes), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        summary = str(error).strip().replace("\n", " ")
        raise ConfigError([Violation("--input", f"{text[:40]}…", f"cannot be read: {summary}")]) from error
    finally:
        for name in _RESOLVERS:
            OmegaConf.clear_resolver(name)
    return dict(_leaves(tree, "", _whole(project)))


def _whole(project: str) -> set[str]:
    """Key paths whose values are taken as they are, sections among them."""
    paths = {key.partition(": ")[2] or key for key in table(project)}
    return paths - {_CRITIC.rstrip(".")}


def _leaves(tree: Mapping[str, Any], prefix: str, whole: set[str]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and path not in whole:
            yield from _leaves(value, f"{path}.", whole)
        else:
            yield path, value


def _in_order_of_table(project: str, theirs: Values) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Their key paths, each with its entry: where two say the same, the first in the table counts."""
    entries = table(project)
    order = {key: number for number, key in enumerate(entries)}
    found = [(path, _entry_name(project, path, theirs, entries)) for path in theirs]
    for path, name in sorted(found, key=lambda each: order.get(each[1] or "", len(order))):
        entry = entries[name] if name else None
        if name is None and project == "mindspeed_rl" and path in _schema():  # the same names
            entry = {"ours": path}
        yield path, entry


@cache
def _schema() -> frozenset[str]:
    return frozenset(".".join(keys) for keys in schema_keys(Config))


def _entry_name(project: str, path: str, theirs: Values, entries: Mapping[str, Any]) -> str | None:
    kind = file_kind(project, theirs)
    candidates = [f"{kind}: {path}", path] if kind else [path]
    if project == "verl" and path.startswith(_CRITIC):
        rest = path.removeprefix(_CRITIC)
        candidates += [f"{actor}.{rest}" for actor in _ACTORS]
    return next((name for name in candidates if name in entries), None)


def file_kind(project: str, theirs: Values) -> str:
    """Which of verl's files it is: "" (ppo_trainer), `sft` or `evaluation`."""
    if project != "verl":
        return ""
    if "model.partial_pretrain" in theirs:
        return "sft"
    return "evaluation" if "data.response_key" in theirs else ""


def _comments(text: str) -> dict[str, tuple[list[str], str]]:
    """Comments by key path: lines directly above a key, and what is behind its value."""
    lines = text.splitlines()
    found: dict[str, tuple[list[str], str]] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            above = list[str]()
            for line in reversed(lines[: key.start_mark.line]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().lstrip("#").strip())
            is_section = isinstance(value, yaml.MappingNode) and not value.flow_style
            mark = key.end_mark if is_section else value.end_mark
            rest = lines[mark.line][mark.column :].strip(": ") if mark.line < len(lines) else ""
            behind = rest.lstrip("#").strip() if rest.startswith("#") else ""
            if above or behind:
                found[f"{prefix}{key.value}"] = above, behind
            walk(value, f"{prefix}{key.value}.")

    walk(yaml.compose(text), "")
    return found


# ---- checking ----------------------------------------------------------------------------------------------------


def _check(found: Migration) -> None:
    """Take out what has no effect, here as there, and list what else our rules say."""
    found.violations = _violations(found)
    idle = {each.path: each for each in found.violations if each.message.startswith(_WITHOUT_EFFECT)}
    for path in idle.keys() & found.values.keys():
        found.left.append(Left(path, found.values.pop(path), idle[path].message))
    if idle:
        found.violations = _violations(found)


def _violations(found: Migration) -> list[Violation]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "migrated.yaml").write_text(found.to_yaml(), encoding="utf-8")
        try:
            load_config("migrated", config_dir=folder)
        except ConfigError as error:
            return error.violations
    return []


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()
