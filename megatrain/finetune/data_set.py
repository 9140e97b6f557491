"""read_data_set(): documents of a data set of the `datasets` library, which stays on the disk."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import OptionError
from megatrain.finetune.documents import Documents, check_record, kind_of_columns, named

TRAIN = "train"
"""The split that is trained on if none is named."""
_SAVED = ("state.json", "dataset_dict.json")
"""By which a folder tells that `save_to_disk` wrote it."""
_TOOLS = "tools"
_CONTENT = "content"
"""Of a message; it may be None, of an assistant that calls tools."""


@dataclass(frozen=True, slots=True)
class MappedRows:
    """The rows of a data set that is mapped into memory, not read: each is made when it is asked for.

    Args:
        table: The data set, of the columns that are used.
    """

    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for row in self.table:
            yield {column: _without_absent(value) for column, value in row.items()}


def read_data_set(name: str, config: str | None, split: str) -> Documents:
    """Opens a split of a data set, and looks at each of its rows once.

    Args:
        name: A folder that `datasets.load_dataset` or `load_from_disk` reads, or a name on the hub.
        config: Which of its configurations; None takes the only one.
        split: Which of its splits.

    Raises:
        OptionError: If it can't be read; if it lacks columns, or a row has something else than text in them.
    """
    table = _opened(name, config, split)
    said = f"`{name}`, {split}"
    columns = list(table.column_names)
    kind = kind_of_columns(f"the split {split} of `{name}`", columns)
    used = [*named(kind), *([_TOOLS] if _TOOLS in columns else [])]
    rows = MappedRows(table.select_columns(used))
    digest = hashlib.sha256()
    for number, row in enumerate(rows, 1):
        check_record(f"row {number} of {said}", kind, row)
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    if not len(rows):
        raise OptionError(
            f"the split {split} of `{name}` has no rows.\n  There must be text to train on.\n  Name another --split."
        )
    return Documents(f"{Path(name).name} ({split})", kind, rows, digest.hexdigest())


def _opened(name: str, config: str | None, split: str) -> Any:
    datasets: Any = importlib.import_module("datasets")  # an optional dependency, which type checkers may not find
    try:
        if not any((Path(name) / each).is_file() for each in _SAVED):
            return datasets.load_dataset(name, config, split=split)
        found = datasets.load_from_disk(name)
    except Exception as error:  # a builder raises anything for files that it can't use
        said = " ".join(str(error).split()) or type(error).__name__
        raise OptionError(
            f"the data set `{name}` can't be read: {said[:300]}\n"
            f"  `datasets.load_dataset` reads it, with the configuration {config or 'that it has'} and the split "
            f"{split}.\n"
            "  Check the name, --data-config and --split; a path is relative to the current folder."
        ) from error
    return _of_saved(found, name, config, split)


def _of_saved(found: Any, name: str, config: str | None, split: str) -> Any:
    """The split of what `save_to_disk` wrote."""
    splits = found if isinstance(found, dict) else {str(found.split or TRAIN): found}
    if config is None and split in splits:
        return splits[split]
    what = f"the configuration {config}" if config is not None else f"a split {split}"
    raise OptionError(
        f"the data set `{name}` has not {what}; its splits are {', '.join(splits)}.\n"
        "  `save_to_disk` wrote it, with splits and without configurations.\n"
        "  Name one of its splits with --split, and no --data-config."
    )


def _without_absent(value: Any) -> Any:
    """A value without the keys that a table fills with None, where JSON leaves them out: templates ask for them."""
    if isinstance(value, dict):
        given: dict[str, Any] = value
        return {key: _without_absent(each) for key, each in given.items() if each is not None or key == _CONTENT}
    if isinstance(value, list):
        items: list[Any] = value
        return [_without_absent(each) for each in items]
    return value
