"""Fitting: whether a saved value may replace an existing one, by their kinds."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from megatrain.checks import shown
from megatrain.files.json_file import MAX_INT

_KINDS: Sequence[tuple[type | tuple[type, ...], str]] = (
    (type(None), "None"),
    (bool, "flag"),
    ((int, float), "number"),
    (str, "text"),
    (torch.Tensor, "tensor"),
    (np.ndarray, "array"),
    (collections.Counter, "counter"),
    (dict, "dict"),
    (list, "list"),
    (tuple, "tuple"),
)
_ALSO: Mapping[str, Collection[str]] = {
    # A new object may have None where a value comes later; a flag that is None lets the optimizer choose.
    "None": ("flag", "number", "tensor"),
    "flag": ("None",),
    "number": ("tensor",),
    "tensor": ("number",),
}
"""Kinds that may replace a kind, besides the kind itself."""


def misfits(own: Any, saved: Any, place: str, *, is_whole: bool = False) -> Iterator[str]:
    """Yields the places where a saved value has another kind than the value that it would replace.

    Args:
        own: The existing value.
        saved: The saved value.
        place: The name of the value.
        is_whole: Whether dicts within the saved value must have all names of the existing dicts.
    """
    here, there = name_of_kind(own), name_of_kind(saved)
    if there != here and there not in _ALSO.get(here, ()):
        yield f"`{place}` is a {here} here, but {shown(saved)} in the checkpoint"
    elif there == "number" and isinstance(saved, int) and abs(saved) > MAX_INT:
        yield f"`{place}` is {shown(saved)} in the checkpoint, which isn't a valid value"
    elif "tensor" in (here, there) and {here, there} != {"tensor"} and isinstance(saved, torch.Tensor):
        if saved.numel() != 1 and here != "None":
            yield f"`{place}` is a number here, but a tensor of {saved.numel()} in the checkpoint"
    elif here == there:
        yield from _inner(own, saved, place, is_whole=is_whole)


def _inner(own: Any, saved: Any, place: str, *, is_whole: bool) -> Iterator[str]:
    length = len(cast(Sequence[Any], own)) if isinstance(own, list | tuple) else 0
    # A list may have grown since it was made.
    if len(saved) != length if isinstance(own, tuple) else isinstance(own, list) and len(saved) < length:
        yield f"`{place}` is {shown(own)} here, but {shown(saved)} in the checkpoint"
    elif isinstance(own, list | tuple):
        for i, (one, other) in enumerate(zip(cast(Sequence[Any], own), saved, strict=False)):
            yield from misfits(one, other, f"{place}.{i}", is_whole=is_whole)
    elif isinstance(own, dict):
        for key, value in cast(dict[Any, Any], own).items():
            if key in saved:
                yield from misfits(value, saved[key], f"{place}.{key}", is_whole=is_whole)
            elif is_whole and not isinstance(own, collections.Counter):
                yield f"`{place}.{key}` is not in the checkpoint"


def name_of_kind(value: object) -> str:
    """Names the kind of a value that a checkpoint can hold; of another one, its class."""
    return next((name for kinds, name in _KINDS if isinstance(value, kinds)), type(value).__qualname__)
