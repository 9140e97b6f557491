"""Values: Python values as JSON that gives back equal ones, types included; tensors in them are stored apart."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatrain.saving.source import Source, obstacle

_PLAIN = (type(None), bool, int, str)


class Encoder:
    """Turns values into JSON.

    `tensors` collects the tensors by the name that they are stored under, the path to them in the value, and `problems`
    says what can't be stored.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Source] = {}
        self.problems: list[str] = []

    def encode(self, value: Any, path: str) -> Any:
        """Returns JSON for `value`.

        Args:
            value: None, a number, a text, a tensor, an array, or a dict, list, tuple or Counter of values.
            path: Where it is, for names of tensors and for problems.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"!float": repr(float(value))}
        if isinstance(value, torch.Tensor | np.ndarray | Source):
            return self._tensor(value, path)
        if isinstance(value, list | tuple) and type(value) in (list, tuple, torch.Size):
            items = [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"!tuple": items}
        if type(value) in (dict, collections.OrderedDict, collections.Counter):
            return self._dict(value, path)
        self.problems.append(f"`{path}` is a {type(value).__module__}.{type(value).__qualname__}")
        return None

    def _dict(self, value: Any, path: str) -> Any:
        pairs = [(key, self.encode(item, f"{path}.{key}")) for key, item in value.items()]
        is_counter = isinstance(value, collections.Counter)
        if not is_counter and all(type(key) is str and not key.startswith("!") for key, _ in pairs):
            return dict(pairs)
        keys = [self.encode(key, f"{path}, key {key!r}") for key, _ in pairs]
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


def decode(encoded: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
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
