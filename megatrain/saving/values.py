"""Values: Python values as JSON that gives back equal ones, types included; tensors in them are stored apart."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from megatrain.checks import shown
from megatrain.errors import CheckpointError
from megatrain.files.disk import Source, obstacle

MAX_DEPTH = 40
"""Values in one another; in JSON each is up to three deep, and `json_file.MAX_DEPTH` holds for all of a file."""

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


def decoded(encoded: Any, tensors: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
    """Returns the value that `encode` made JSON of.

    Args:
        encoded: The JSON.
        tensors: What is stored, by name.
        read: Reads a tensor that is stored.

    Raises:
        CheckpointError: If `encode` makes no such JSON, a tensor isn't stored, or its bytes are damaged.
    """
    try:
        return _decoded(encoded, lambda name: read(tensors[name]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint is damaged: {shown(encoded)} is no value that a save writes: {error!r}.\n"
            "  Values that JSON doesn't have are objects with one tag, and each tensor is stored under its name.\n"
            "  Copy the checkpoint again, or load an older one."
        ) from error


def _decoded(encoded: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(encoded, list):
        return [_decoded(item, tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag: str = next(iter(encoded), "")
    if not tag.startswith("!"):
        return {key: _decoded(item, tensor) for key, item in encoded.items()}
    ((_, content),) = encoded.items()
    if tag in ("!dict", "!counter"):
        made = {_decoded(key, tensor): _decoded(item, tensor) for key, item in content}
        return collections.Counter(made) if tag == "!counter" else made
    simple: dict[str, Callable[[], Any]] = {
        "!float": lambda: float(content),
        "!tuple": lambda: tuple(_decoded(item, tensor) for item in content),
        "!tensor": lambda: tensor(content),
        "!array": lambda: tensor(content).numpy(),
    }
    return simple[tag]()
