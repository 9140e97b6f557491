"""Forging: manifests that say something else under a right checksum, one change at a time."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Place = tuple[Any, ...]
"""Keys and positions that lead to a value in JSON."""

DROPPED = object()

CHANGES: dict[str, Callable[[Any], Any]] = {
    "dropped": lambda _: DROPPED,
    "null": lambda _: None,
    "flag": lambda _: True,
    "negative": lambda _: -1,
    "one more": lambda value: value + 1 if type(value) is int else 7,
    "huge": lambda _: 2**45,
    "beyond 64 bits": lambda _: 2**64,
    "400 digits": lambda _: 10**400,
    "fraction": lambda _: 0.5,
    "text": lambda _: "evil",
    "empty text": lambda _: "",
    "surrogate": lambda _: "\ud800",
    "NUL": lambda _: "a\0b",
    "list": lambda _: [],
    "listed": lambda value: [value],
    "object": lambda _: {},
    "inside": lambda value: {"evil": value},
    "tag": lambda value: {"!evil": value},
    "tuple": lambda value: {"!tuple": value},
    "no tuple": lambda _: {"!tuple": 5},
    "tensor": lambda _: {"!tensor": "evil"},
    "no name": lambda _: {"!tensor": []},
    "pairs": lambda _: {"!dict": [[[], 1]]},
    "no pairs": lambda _: {"!counter": 3},
    "float": lambda _: {"!float": "evil"},
    "deep": lambda value: _deep(value, 150),
    "up": lambda _: "../run/checkpoint.json",
    "absolute": lambda _: "/etc/passwd",
    "itself": lambda _: "checkpoint.json",
    "long": lambda _: "x" * 5000,
}
"""What becomes of a value."""


def _deep(value: Any, count: int) -> Any:
    for _ in range(count):
        value = [value]
    return value


def at(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def changed(content: Any, place: Place, change: Callable[[Any], Any]) -> Any:
    """A copy with another value at a place."""
    if not place:
        return {} if (made := change(content)) is DROPPED else made
    made = copy.deepcopy(content)
    holder = at(made, place[:-1])
    value = change(holder[place[-1]])
    if value is DROPPED:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return made


def content_of(folder: Path) -> Any:
    return json.loads((folder / "checkpoint.json").read_text())["content"]


def forge(folder: Path, content: Any) -> None:
    """Writes a manifest with a right checksum."""
    text = json.dumps([2, content], separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    document = {"schema": 2, "sha256": digest, "content": content}
    (folder / "checkpoint.json").write_text(json.dumps(document, separators=(",", ":")))
