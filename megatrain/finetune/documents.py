"""Documents: what a file of data holds, read and checked line by line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatrain.errors import OptionError

TEXT, CHAT, PROMPT = "text", "messages", "prompt"
_COLUMNS: Mapping[str, tuple[str, ...]] = {CHAT: ("messages",), PROMPT: ("prompt", "completion"), TEXT: ("text",)}
"""What lines of a .jsonl and rows of a data set have, by kind; the first kind that fits the first line counts."""
_WORDS = {TEXT: ("text", "texts"), CHAT: ("chat", "chats"), PROMPT: ("prompt", "prompts")}


class Records(Protocol):
    """Examples, each with its columns; they may be read when they are asked for, and more than once."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Documents:
    """The examples of a file or of a data set.

    Args:
        name: Of the file, without its folder; or of the data set, and its split.
        kind: `"text"`, `"messages"` or `"prompt"`.
        records: For each example its columns.
        digest: SHA-256 of the file, or of the rows.
    """

    name: str
    kind: str
    records: Records
    digest: str

    def __str__(self) -> str:
        """What it is, in a few words."""
        return f"{self.name}: {len(self.records)} {_WORDS[self.kind][len(self.records) != 1]}"


def read_documents(path: Path, *, split: bool = False) -> Documents:
    """Reads a .jsonl or .txt file.

    Args:
        path: Of the file, which exists.
        split: Empty lines of a .txt separate documents.

    Raises:
        OptionError: If it isn't UTF-8 or has no text; if a line isn't JSON or lacks a column.
    """
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise OptionError(
            f"line {line} of `{path}` is not UTF-8.\n  Data is read as UTF-8.\n  Convert the file, with iconv say."
        ) from error
    if path.suffix == ".txt":
        parts = re.split(r"\n[ \t\r]*\n\s*", text) if split else [text]
        records: list[Mapping[str, Any]] = [{"text": part} for part in parts if part.strip()]
        kind = TEXT
    else:
        kind, records = _read_lines(path, text)
    if not records:
        raise OptionError(
            f"`{path}` has no text.\n  There must be text to train on.\n  Check what has written the file."
        )
    return Documents(path.name, kind, tuple(records), hashlib.sha256(content).hexdigest())


def _read_lines(path: Path, text: str) -> tuple[str, list[Mapping[str, Any]]]:
    kind, records = TEXT, list[Mapping[str, Any]]()
    # Not splitlines(): JSON may have U+2028 within a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"line {number} of `{path}`"
        found = _object(place, line)
        if not records:
            kind = kind_of_columns(place, found)
        check_record(place, kind, found)
        records.append(found)
    return kind, records


def _object(place: str, line: str) -> Mapping[str, Any]:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"{place} is not JSON: {error}.\n  Each line of a .jsonl is a JSON object.\n"
            '  Write for example {"text": "Once upon a time"}.'
        ) from error
    if not isinstance(found, dict):
        raise OptionError(
            f"{place} is not a JSON object.\n  Each line of a .jsonl is a JSON object.\n"
            '  Write for example {"text": "Once upon a time"}.'
        )
    return found


def named(kind: str) -> tuple[str, ...]:
    """Returns the columns of a kind."""
    return _COLUMNS[kind]


def kind_of_columns(place: str, found: Iterable[str]) -> str:
    """Tells by the names of columns what they hold.

    Args:
        place: Where they are, for the error.
        found: The names.

    Raises:
        OptionError: If there is no text among them.
    """
    found = list(found)
    for kind, columns in _COLUMNS.items():
        if all(name in found for name in columns):
            return kind
    raise OptionError(
        f"{place} has {_listed(found)}.\n  An example has `text`, `messages`, or `prompt` and `completion`.\n"
        "  Rename the columns."
    )


def check_record(place: str, kind: str, found: Mapping[str, Any]) -> None:
    """Checks the columns of an example.

    Args:
        place: Where it is, for the error.
        kind: What it should have.
        found: The example.

    Raises:
        OptionError: If a column is missing, or has something else.
    """
    for name in _COLUMNS[kind]:
        if name not in found:
            raise OptionError(
                f"{place} has no `{name}`; it has {_listed(found)}.\n"
                f"  All lines of a file have the columns of the first: {', '.join(_COLUMNS[kind])}.\n"
                "  Add it, or take the line out."
            )
        fault = _FAULTS[name](found[name])
        if fault is not None:
            raise OptionError(f"`{name}` in {place} {fault}.\n  {_RULES[name]}\n  Correct the line, or take it out.")


def _listed(found: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in found) or "no columns"


def _text_fault(value: Any) -> str | None:
    return None if isinstance(value, str) else "is not a text"


def _chat_fault(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "is not a list of messages"
    for number, message in enumerate(value, 1):  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:  # pyright: ignore[reportUnknownMemberType]
            return f"has a message {number} without a role and a content"
    return None


_FAULTS: Mapping[str, Callable[[Any], str | None]] = {
    "text": _text_fault,
    "prompt": _text_fault,
    "completion": _text_fault,
    "messages": _chat_fault,
}
_RULES: Mapping[str, str] = {
    **{name: f"`{name}` is a text." for name in ("text", "prompt", "completion")},
    "messages": '`messages` is a list of objects such as {"role": "user", "content": "Hello"}.',
}
