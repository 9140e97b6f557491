"""JSON from files: read strictly, and compared with a type before any use."""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from megatrain.base.checks import shown

_T = TypeVar("_T")

MAX_BYTES = 2**30
"""A text above this is not read: it describes tensors and holds none."""
MAX_INT = 2**63 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


def read_json(path: Path) -> Any:
    """Reads a file of JSON, strictly: no name twice, no NaN, no number beyond a float, nothing after the value.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is something else, with the reason.
    """
    if not regular(path):
        raise ValueError("it isn't a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise ValueError(f"it has {size} B, more than {MAX_BYTES} B")
        return parse_json(file.read(size))


def parse_json(content: bytes) -> Any:
    """Reads JSON as `read_json` does."""
    try:
        # Not msgspec: users' texts may have surrogates, which it refuses.
        return json.loads(content.decode(), object_pairs_hook=_distinct, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"{shown(twice)} is in one object twice")
    return made


def _finite(written: str) -> float:
    if not math.isfinite(value := float(written)):
        raise ValueError(f"{written} isn't a finite number")
    return value


def of_kind(value: Any, kind: type[_T] | Any, place: str) -> _T:
    """Returns a value as a type for msgspec says, which may name types that JSON doesn't have.

    Fields of a `TypedDict` are looked at, and the others are left out of the result.

    Raises:
        ValueError: If it is of another type, with the place of the first wrong field.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        raise ValueError(f"`{place}{path.rstrip('`')}` is wrong: {what[:1].lower()}{what[1:]}") from error


def regular(path: Path) -> bool:
    """Tells whether it is a file, or a link to one; a pipe or a device would never end."""
    return stat.S_ISREG(path.stat().st_mode)


def is_inside(file: str) -> bool:
    """Tells whether a text is the path of a file in the folder of the JSON: relative, and never up."""
    try:
        parts = os.fsencode(file).split(b"/")
    except ValueError:
        return False
    return not any(part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 for part in parts)
