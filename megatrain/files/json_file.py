"""JSON from files: read strictly, and compared with a type before any use."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec

from megatrain.checks import shown

_T = TypeVar("_T")

MAX_BYTES = 2**30
"""A text above this is not read: it describes tensors and holds none."""
MAX_DEPTH = 200
"""Lists and objects in one another: what walks through them later does so by recursion."""
MAX_INT = 2**63 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
_DEEP = f"lists or objects are nested more than {MAX_DEPTH} deep"


def read_json(path: Path) -> Any:
    """Reads a file of JSON, as strictly as the format is written down: no name twice, no NaN, no number beyond a float.

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
    """Reads JSON; see `read_json`."""
    try:
        value = json.loads(
            content.decode(), object_pairs_hook=_distinct, parse_constant=_no_number, parse_float=_finite
        )
    except RecursionError as error:
        raise ValueError(_DEEP) from error
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        if isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                raise ValueError(_DEEP)
            inner = cast(dict[Any, Any], item).values() if isinstance(item, dict) else cast(list[Any], item)
            left += [(each, depth + 1) for each in inner if isinstance(each, dict | list)]
    return value


def of_kind(value: Any, kind: type[_T] | Any, place: str) -> _T:
    """Returns a value as a type for msgspec says.

    Args:
        value: From JSON, or of types that JSON doesn't have, which `kind` names.
        kind: The type. Fields of a `TypedDict` are looked at, and the others are left out of the result.
        place: The name of the value.

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


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"{shown(key)} is in one object twice")
        made[key] = value
    return made


def _no_number(written: str) -> float:
    raise ValueError(f"{written} isn't a number in JSON")


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"{shown(written)} is too large for a float")
    return value
