"""Forging: manifests that say something else under a right checksum, one change at a time."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

Place = tuple[Any, ...]
"""Keys and positions that lead to a value in JSON."""

DROPPED = object()
"""In a value's place: it goes."""


def at(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def changed(content: Any, place: Place, value: Any) -> Any:
    """A copy with another value at a place."""
    made = copy.deepcopy(content)
    holder = at(made, place[:-1])
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
