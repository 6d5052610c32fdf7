"""A data set of the user's: `custom_dataset`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.common.user_code import call_user, user_class
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
    kind, call = user_class(custom.path, custom.name, KEY), partial(call_user, KEY)
    data = call(f"{custom.name}(…)", kind, [str(file) for file in files], tokenizer, actor)
    for index in range(call(f"len({custom.name})", len, data)):
        where = f"{custom.name}[{index}]"
        row = call(where, data.__getitem__, index)
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: must be an object with columns, is {row!r:.60}")
        yield Record(dict(row), where)
