"""The rows of a training: read from a file or a data set, in the columns that TRL takes, and surveyed."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from megatrain.errors import OptionError
from megatrain.tools.finetune.pretrained import readable

_COLUMNS = (("text",), ("messages",), ("prompt", "completion"))
_SHAREGPT, _ALPACA = "conversations", ("instruction", "output")
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}
"""Who speaks in a turn, by the names of ShareGPT's files."""


def read_rows(name: str, config: str | None, split: str, *, documents: bool, has_template: bool = True) -> Any:
    """The rows of a file (.jsonl, .txt), of a folder or of a data set of the hub, which stay on the disk.

    Rows of ShareGPT (`conversations` of turns with `from` and `value`) become chats. Rows of Alpaca (`instruction`,
    `input`, `output`) do too where the tokenizer has a chat template, and else prompts with their completions.

    With `documents`, empty lines of a .txt separate documents.

    Raises:
        OptionError: If it can't be read, or has other columns, or a turn of somebody else than user and assistant.
    """
    path = Path(name)
    with readable(f"the data `{name}`", "  Check the path, and --data-config and --split of a data set."):
        if path.suffix == ".txt":
            by = "paragraph" if documents else "document"
            rows = datasets.load_dataset("text", data_files=name, sample_by=by, split="train")
        elif path.suffix == ".jsonl":
            rows = datasets.load_dataset("json", data_files=name, split="train")
        elif any((path / each).is_file() for each in ("state.json", "dataset_dict.json")):
            saved: Any = datasets.load_from_disk(name)
            rows = saved[split] if isinstance(saved, dict) else saved
        else:
            rows = datasets.load_dataset(name, config, split=split)
        columns: list[str] = rows.column_names
        if any({*each} <= {*columns} for each in _COLUMNS):
            return rows
        if _SHAREGPT in columns:
            print(f"data    ShareGPT's `{_SHAREGPT}` of `{name}` are read as chats")
            return rows.map(partial(_chat, name), with_indices=True, remove_columns=columns)
        if {*_ALPACA} <= {*columns}:
            what = "chats" if has_template else "prompts and completions"
            print(f"data    Alpaca's instructions of `{name}` are read as {what}")
            return rows.map(_asked_chat if has_template else _asked_prompt, remove_columns=columns)
        raise OptionError(
            f"`{name}` has the columns {', '.join(columns)}.\n"
            "  Rows have `text`, `messages`, or `prompt` and `completion`; or ShareGPT's `conversations`, or Alpaca's "
            "`instruction` and `output`.\n  Rename the columns, or write rows that have one of these."
        )


def _chat(name: str, row: dict[str, Any], index: int) -> dict[str, Any]:
    """A row of ShareGPT as a chat."""
    messages: list[dict[str, str]] = []
    for turn in row[_SHAREGPT]:
        who, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if who not in _ROLES or not isinstance(said, str):
            raise OptionError(
                f"row {index} of `{name}` has a turn from {who!r}.\n"
                f"  Turns of `{_SHAREGPT}` are texts from {', '.join(_ROLES)}.\n"
                "  Leave such rows out, or write them as `messages` of the tokenizer's chat template."
            )
        messages.append({"role": _ROLES[who], "content": said})
    return {"messages": messages}


def _asked_chat(row: dict[str, Any]) -> dict[str, Any]:
    turns = ("user", _asked(row)), ("assistant", row["output"])
    return {"messages": [{"role": role, "content": said} for role, said in turns]}


def _asked_prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": f"{_asked(row)}\n\n", "completion": row["output"]}


def _asked(row: dict[str, Any]) -> str:
    return "\n\n".join(filter(None, (row["instruction"], row.get("input"))))


def learnt(rows: Any) -> Any:
    """The rows with a token to learn: one that follows another."""
    return rows.filter(lambda labels: any(label != -100 for label in labels[1:]), input_columns="labels")


def survey(rows: Any) -> tuple[int, int, str]:
    """The longest row, the largest id, and a digest of all ids and labels."""
    width, largest, digest = 0, 0, hashlib.sha256()
    for table in rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(batch_size=1000):
        ids, labels = (table[name].combine_chunks() for name in ("input_ids", "labels"))
        lengths, flat = ids.value_lengths().to_numpy(), ids.flatten().to_numpy()
        width, largest = max(width, int(lengths.max())), max(largest, int(flat.max(initial=0)))
        for values in (lengths, flat, labels.flatten().to_numpy()):
            digest.update(values.astype("int64").tobytes())
    return width, largest, digest.hexdigest()
