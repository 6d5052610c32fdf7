"""A data set of the user's: `custom_dataset`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from mindspeed_rl.common.errors import ConfigError, DataError, Violation
from mindspeed_rl.common.user_code import run_user_file
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.data.records import Record

KEY = "megatron_training.custom_dataset"


class CustomDataset(Protocol):
    """What a class of the user's must be: read once, at the start; a run that is resumed must find the same rows."""

    def __init__(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: MegatronConfig) -> None: ...

    def __len__(self) -> int:
        """How many rows there are."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """A row with the columns `prompt_key`, `answer_key`, and perhaps `data_source_key` and `extra`."""


def custom_records(
    actor: MegatronConfig, files: Sequence[Path], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Record]:
    """The rows of the class that `custom_dataset` names.

    Raises:
        ConfigError: the file cannot be run, or has no such class.
        DataError: the class raises an error, or gives what is no row; names the row.
    """
    custom = actor.custom_dataset
    assert custom is not None, "asked for only where there is one"
    module = run_user_file(custom.path, "custom_dataset", f"{KEY}.path")
    kind = getattr(module, custom.name, None)
    if not isinstance(kind, type):
        classes = sorted(name for name, value in vars(module).items() if isinstance(value, type))
        raise ConfigError(
            [Violation(f"{KEY}.name", custom.name, f"is no class in {custom.path}", f"it has {classes}")]
        )
    data = _call(f"{custom.name}(…)", kind, [str(file) for file in files], tokenizer, actor)
    for index in range(_call(f"len({custom.name})", len, data)):
        where = f"{custom.name}[{index}]"
        row = _call(where, data.__getitem__, index)
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: must be an object with columns, is {row!r:.60}")
        yield Record(dict(row), where)


def _call(what: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # whatever the user's code may raise
        raise DataError(f"custom_dataset: {what} raised {type(error).__name__}: {error}") from error
