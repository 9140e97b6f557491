"""Rules: the allowed contents of JSON from a file, declared field by field, and checked before any use."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from megatrain import checks
from megatrain.checks import shown

Rule = Callable[[Any, str], Iterator[str]]
"""Given a value and where it stands, says all that is wrong with it."""

MAX_BYTES = 2**30
"""A text above this is not read: it describes tensors and holds none."""
MAX_DEPTH = 200
"""Lists and objects in one another: what walks through them later does so by recursion."""
MAX_INT = 2**63 - 1
_MAX_NAME = 60


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
    _check_depth(value)
    return value


def regular(path: Path) -> bool:
    """Tells whether it is a file, or a link to one; a pipe or a device would never end."""
    return stat.S_ISREG(path.stat().st_mode)


def problems(rule: Rule, value: Any, place: str, limit: int = 8) -> list[str]:
    """Returns the first fault of a value; nothing if it obeys the rule."""
    return list(islice(rule(value, place), limit))


# -- rules ---------------------------------------------------------------------------------------------------------


def anything(value: Any, place: str) -> Iterator[str]:
    """Any JSON value."""
    yield from ()


def single(rule: checks.Rule) -> Rule:
    """Applies a rule for options to one value."""

    def check(value: Any, place: str) -> Iterator[str]:
        if rule.fault(value) is not None:
            yield f"{place} is {shown(value)}, not {rule.text}"

    return check


def integer(low: int = 0, high: int = MAX_INT) -> Rule:
    """A whole number from `low` to `high`; True and False are none."""
    return single(checks.count(low, high))


def text(pattern: str = "", what: str = "a text") -> Rule:
    """A text; with `pattern`, one that it matches as a whole."""
    found = re.compile(pattern or ".*", re.DOTALL)
    return single(checks.Rule(what, "", lambda v: None if isinstance(v, str) and found.fullmatch(v) else "is another"))


def one_of(values: Collection[object]) -> Rule:
    """One of these, of the same type."""
    known = {(type(value), value) for value in values}
    words = f"one of {', '.join(map(repr, values))}"
    return single(checks.Rule(words, "", lambda v: None if _is_among(v, known) else "is another"))


def _is_among(value: Any, known: Collection[tuple[type, object]]) -> bool:
    return any(type(value) is kind and value == each for kind, each in known)


def optional(inner: Rule) -> Rule:
    """None, or a value that obeys `inner`."""
    return lambda value, place: inner(value, place) if value is not None else iter(())


def both(first: Rule, second: Rule) -> Rule:
    """A value that obeys `first` and `second`, checked in this order."""

    def rule(value: Any, place: str) -> Iterator[str]:
        wrong = list(first(value, place))
        yield from wrong or second(value, place)

    return rule


def listing(inner: Rule) -> Rule:
    """A list of any length."""

    def rule(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{place} is {shown(value)}, not a list"
            return
        for i, item in enumerate(cast(list[Any], value)):
            yield from inner(item, f"{place}.{i}")

    return rule


def entries(*inner: Rule, kind: type = list) -> Rule:
    """A list, or a `kind`, with a rule for each item."""

    def rule(value: Any, place: str) -> Iterator[str]:
        if type(value) is not kind or len(value) != len(inner):
            yield f"{place} is {shown(value)}, not a {kind.__name__} of {len(inner)}"
            return
        for i, (item, each) in enumerate(zip(cast(Sequence[Any], value), inner, strict=True)):
            yield from each(item, f"{place}.{i}")

    return rule


def mapping(names: Rule, values: Rule) -> Rule:
    """An object with any names that fit `names`."""

    def rule(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{place} is {shown(value)}, not an object"
            return
        for name, item in cast(dict[Any, Any], value).items():
            yield from names(name, f"a name in {place}")
            yield from values(item, _inside(place, name))

    return rule


def record(fields: Mapping[str, Rule], others: Rule | None = None) -> Rule:
    """An object with these fields, and further ones only where `others` is their rule."""

    def rule(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{place} is {shown(value)}, not an object"
            return
        known = cast(dict[Any, Any], value)
        for name, inner in fields.items():
            if name not in known:
                yield f"{place} has no `{name}`"
            else:
                yield from inner(known[name], _inside(place, name))
        for name in (name for name in known if name not in fields):
            if others is None or not isinstance(name, str):
                yield f"{place} has {shown(name)}, which isn't allowed"
            else:
                yield from others(known[name], _inside(place, name))

    return rule


def inside(value: Any, place: str) -> Iterator[str]:
    """The path of a file in the folder of the JSON: relative, and never up."""
    try:
        parts = os.fsencode(value).split(b"/") if isinstance(value, str) else []
    except ValueError:
        parts = []
    if not parts or any(part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 for part in parts):
        yield f"{place} is {shown(value)}, not the name of a file in this folder"


def name(value: Any, place: str) -> Iterator[str]:
    """A text that files can hold: no half of a surrogate pair."""
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        yield f"{place} is {shown(value)}, not a name"


# -- parsing ---------------------------------------------------------------------------------------------


def _inside(place: str, key: object) -> str:
    plain = isinstance(key, str) and key.isprintable() and len(key) <= _MAX_NAME
    return f"{place}.{key if plain else shown(key)}"


_DEEP = f"lists or objects are nested more than {MAX_DEPTH} deep"


def _check_depth(value: Any) -> None:
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        if isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                raise ValueError(_DEEP)
            inner = cast(dict[Any, Any], item).values() if isinstance(item, dict) else cast(list[Any], item)
            left += [(each, depth + 1) for each in inner if isinstance(each, dict | list)]


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
