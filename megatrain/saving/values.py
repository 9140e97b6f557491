"""Values: Python values as JSON that gives back equal ones, types included; tensors in them are stored apart."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch

from megatrain.checks import shown
from megatrain.files.byte_source import Source, obstacle
from megatrain.files.json_rules import entries, listing, one_of, text

MAX_DEPTH = 40
"""Values in one another; in JSON each is up to three deep, and `json_rules.MAX_DEPTH` holds for all of a file."""

_PLAIN = (type(None), bool, int, str)


class Encoder:
    """Turns values into JSON.

    `tensors` collects the tensors by the name that they are stored under, the path to them in the value, and `problems`
    says what can't be stored.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Source] = {}
        self.problems: list[str] = []

    def encode(self, value: Any, path: str, depth: int = 1) -> Any:
        """Returns JSON for `value`.

        Args:
            value: None, a number, a text, a tensor, an array, or a dict, list, tuple or Counter of values.
            path: Where it is, for names of tensors and for problems.
            depth: How many values it lies in, itself counted.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"!float": repr(float(value))}
        if isinstance(value, torch.Tensor | np.ndarray | Source):
            return self._tensor(value, path)
        if type(value) in (list, tuple, torch.Size, dict, collections.OrderedDict, collections.Counter):
            return self._container(value, path, depth)
        self.problems.append(f"`{path}` is a {type(value).__module__}.{type(value).__qualname__}")
        return None

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.problems.append(f"`{path[:200]}...` is nested deeper than {MAX_DEPTH} values")
            return None
        if isinstance(value, dict):
            return self._dict(cast(dict[Any, Any], value), path, depth)
        items = [self.encode(item, f"{path}.{i}", depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"!tuple": items}

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        pairs = [(key, self.encode(item, f"{path}.{key}", depth + 1)) for key, item in value.items()]
        is_counter = isinstance(value, collections.Counter)
        if not is_counter and all(type(key) is str and not key.startswith("!") for key, _ in pairs):
            return dict(pairs)
        keys = [self.encode(key, f"{path}, key {key!r}", depth + 1) for key, _ in pairs]
        return {"!counter" if is_counter else "!dict": [[k, v] for k, (_, v) in zip(keys, pairs, strict=True)]}

    def _tensor(self, value: torch.Tensor | np.ndarray | Source, path: str) -> Any:
        tag = "!tensor"
        if isinstance(value, np.ndarray):
            tag = "!array"
            try:
                value = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())
            except TypeError as error:
                self.problems.append(f"`{path}` is an array that torch can't hold: {error}")
                return None
        if isinstance(value, torch.Tensor):
            problem = obstacle(value)
            if problem is not None:
                self.problems.append(f"`{path}` {problem}")
                return None
            value = Source.of(value)
        name = path
        while name in self.tensors:
            name += "'"
        self.tensors[name] = value
        return {tag: name}


def encoded(value: Any, place: str) -> Iterator[str]:
    """The rule of what `encode` returns."""
    if isinstance(value, list):
        yield from listing(encoded)(value, place)
    elif isinstance(value, dict):
        held = cast(dict[str, Any], value)
        tag = next((key for key in held if key.startswith("!")), None)
        if tag is None:
            for key, item in held.items():
                yield from encoded(item, f"{place}.{key}")
        elif tag not in _TAGGED or len(held) != 1:
            yield f"{place} is {shown(value)} with {shown(tag)}, an unknown tag"
        else:
            yield from _TAGGED[tag](held[tag], place)


def _pairs(value: Any, place: str) -> Iterator[str]:
    wrong = list(listing(entries(_key, encoded))(value, place))
    yield from wrong
    if not wrong and len({decode(key, lambda name: name) for key, _ in value}) < len(value):
        yield f"{place} has a key twice"


def _key(value: Any, place: str) -> Iterator[str]:
    """What a key of a dict may be: a value that can be hashed."""
    if isinstance(value, dict) and "!tuple" in value:
        yield from encoded(value, place)
        if isinstance(value["!tuple"], list):
            yield from listing(_key)(value["!tuple"], place)
    elif isinstance(value, list) or (isinstance(value, dict) and value.keys() not in ({"!float"}, {"!tensor"})):
        yield f"{place} is {shown(value)}, which can't be a key"
    else:
        yield from encoded(value, place)


_TAGGED = {
    "!float": one_of(("nan", "inf", "-inf")),
    "!tuple": listing(encoded),
    "!tensor": text(),
    "!array": text(),
    "!dict": _pairs,
    "!counter": _pairs,
}


def tensor_places(value: Any, path: str, *, is_known: bool = True) -> Iterator[tuple[str, bool, str, bool]]:
    """Lists the tensors that JSON of `encode` refers to.

    Yields:
        The path, or what it begins with; whether that is all of it; the name; and whether it is for an array.
    """
    if isinstance(value, list):
        for i, item in enumerate(cast(list[Any], value)):
            yield from tensor_places(item, f"{path}.{i}" if is_known else path, is_known=is_known)
    elif isinstance(value, dict):
        held = cast(dict[str, Any], value)
        tag = next(iter(held), "")
        if tag in ("!tensor", "!array"):
            yield path, is_known, held[tag], tag == "!array"
        elif tag in ("!dict", "!counter"):
            yield from tensor_places(held[tag], path, is_known=False)
        elif tag == "!tuple":
            yield from tensor_places(held[tag], path, is_known=is_known)
        elif tag != "!float":
            for key, item in held.items():
                yield from tensor_places(item, f"{path}.{key}" if is_known else path, is_known=is_known)


def decode(encoded: Any, tensor: Callable[[str], Any]) -> Any:
    """Returns the value that `encode` made JSON of.

    Args:
        encoded: The JSON.
        tensor: Reads the tensor that is stored under a name.
    """
    if isinstance(encoded, list):
        return [decode(item, tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag: str = next(iter(encoded), "")
    content: Any = encoded.get(tag)
    if not tag.startswith("!"):
        return {key: decode(item, tensor) for key, item in encoded.items()}
    if tag in ("!dict", "!counter"):
        made = {decode(key, tensor): decode(item, tensor) for key, item in content}
        return collections.Counter(made) if tag == "!counter" else made
    simple: dict[str, Callable[[], Any]] = {
        "!float": lambda: float(content),
        "!tuple": lambda: tuple(decode(item, tensor) for item in content),
        "!tensor": lambda: tensor(content),
        "!array": lambda: tensor(content).numpy(),
    }
    return simple[tag]()
