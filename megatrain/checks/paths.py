"""Paths: values that can name a file or a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatrain.checks.rules import Rule, named, shown

# Of the file systems in use; the system itself answers a longer one with an error that names no option.
_MOST_PART_BYTES = 255
_MOST_BYTES = 4095


def path_fault(value: Any) -> str | None:
    """Completes "folder=... " for a value that can't be a path; None for a path, whether or not it exists."""
    if not isinstance(value, str | os.PathLike):
        return f"is not a path but {named(value)}"
    text: Any = os.fspath(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if not isinstance(text, str):
        return "is not a path in text"
    if not text.strip() or "\0" in text:
        return "is not a path: it has a NUL character" if "\0" in text else "is not a path: it is empty"
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        return "is not a path: it has characters that no file name has"
    if len(encoded) > _MOST_BYTES or max(map(len, encoded.split(b"/"))) > _MOST_PART_BYTES:
        return "is not a path: it is too long"
    return None


def _paths_fault(value: Any) -> str | None:
    if isinstance(value, str | os.PathLike) or not isinstance(value, Sequence):
        return path_fault(value)  # pyright: ignore[reportUnknownArgumentType]
    if not value:
        return "is not a path: it is an empty list"
    faults: list[str] = []
    for item in value:  # pyright: ignore[reportUnknownVariableType]
        fault = path_fault(item)
        faults += [] if fault is None else [f"has {shown(item)}, which {fault}"]  # pyright: ignore[reportUnknownArgumentType]
    return faults[0] if faults else None


PATH = Rule("the path of a file or a folder", '{name}="runs/first"', path_fault)
PATHS = Rule(
    "a safetensors file, a folder with such files, or a list of them", '{name}="model.safetensors"', _paths_fault
)
