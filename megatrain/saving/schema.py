"""Schema: the allowed contents of a manifest; a manifest is compared with the schema before any use.

A checksum finds damage. Someone who forges a manifest can forge its checksum as well.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatrain.checks import shown
from megatrain.files.json_rules import (
    MAX_INT,
    Rule,
    anything,
    both,
    entries,
    inside,
    integer,
    listing,
    mapping,
    name,
    one_of,
    optional,
    problems,
    record,
    text,
)
from megatrain.files.weight_files import DTYPES
from megatrain.saving.values import encoded, tensor_places

FILE = "checkpoint.json"
INDEX = "model.safetensors.index.json"
TRAINING = "training"
"""Folder of what is no weight, so that readers of weights don't meet it."""
NEWEST = 2
"""1: no version of torch, no scheduler's class; its number is under no checksum."""
READABLE = (1, NEWEST)

_MAX_HEADER = 100_000_000
"""The library of safetensors reads none above."""
_NUMBERED = re.compile(rf"(model|{TRAINING}/(?:optimizer|extra|tensors))-(\d{{5,9}})-of-(\d{{5,9}})\.safetensors")
_NO_ARRAYS = ("BF16", "F8_E4M3", "F8_E5M2")

# -- field by field ------------------------------------------------------------------------------------------------

DIGEST = text("[0-9a-f]{64}", "a SHA-256 in hexadecimal")
ENVELOPE = record({"schema": integer(), "sha256": DIGEST, "content": record({}, others=anything)})
_TENSOR = entries(one_of(DTYPES), listing(integer()), integer(8), DIGEST)
_FILE = record({"bytes": integer(), "header_bytes": integer(), "sha256": DIGEST, "tensors": mapping(name, _TENSOR)})
_GROUP = both(record({"params": listing(name)}, others=anything), encoded)
_OPTIMIZER = record(
    {
        "class": text(),
        "parameters": mapping(name, text()),
        "param_groups": listing(_GROUP),
        "state": mapping(name, mapping(text(), encoded)),
        "rest": encoded,
    }
)
_FIRST: Mapping[str, Rule] = {
    "files": mapping(inside, _FILE),
    "weights": record({"files": listing(inside), "ties": mapping(name, name)}),
    "optimizer": optional(_OPTIMIZER),
    "extra": mapping(text(), encoded),
}
CONTENT = {1: record(_FIRST), NEWEST: record({**_FIRST, "torch": text()})}


def faults(content: Any, schema: int) -> list[str]:
    """Yields the faults of a manifest's content: faults of single fields, or else contradictions between fields."""
    return problems(CONTENT[schema], content, "content") or problems(_relations, content, "content")


# -- rules between fields ------------------------------------------------------------------------------------------


def _relations(content: Any, _: str) -> Iterator[str]:
    files: dict[str, Any] = content["files"]
    for file, entry in files.items():
        yield from _layout(file, entry)
    stems: dict[str, dict[int, str]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, files)):
        stems.setdefault(match[1], {})[int(match[2])] = match[0]
    tensors: dict[str, dict[str, Any]] = {}
    for stem, numbered in stems.items():
        yield from _numbering(stem, numbered)
        listed = [each for file in numbered.values() for each in files[file]["tensors"]]
        yield from (f"`{stem}` has {shown(each)} twice" for each, count in Counter(listed).items() if count > 1)
        tensors[stem] = {each: entry for file in numbered.values() for each, entry in files[file]["tensors"].items()}
    if INDEX not in files:
        yield f"content.files has no `{INDEX}`"
    weights = content["weights"]
    if sorted(weights["files"]) != sorted(stems.get("model", {}).values()):
        yield "content.weights.files are not the files of weights"
    for tie, stored in weights["ties"].items():
        if tie in tensors.get("model", {}) or stored not in tensors.get("model", {}):
            yield f"content.weights.ties.{shown(tie)} is not another name of a weight"
    yield from _refer(content["extra"].items(), tensors.get(f"{TRAINING}/extra", {}))
    yield from _optimizer(content["optimizer"], tensors.get(f"{TRAINING}/optimizer", {}))


def _layout(file: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """A file of tensors has them behind its header, one after the other; any other file is all header."""
    place = f"content.files.{shown(file)}"
    if _NUMBERED.fullmatch(file) is None:
        if file == FILE or file.endswith(".safetensors") or file.split("/")[0] == TRAINING:
            yield f"{place} isn't a name for a file next to the weights"
        if entry["tensors"] or entry["header_bytes"] != entry["bytes"]:
            yield f"{place} has tensors, or bytes after its header"
        return
    end: int = entry["header_bytes"]
    if not 8 <= end <= _MAX_HEADER:
        yield f"{place}.header_bytes is {end}, not a number from 8 to {_MAX_HEADER}"
    for each, (kind, shape, start, _) in _in_order(entry["tensors"]):
        yield from _sizes(f"{place}.{shown(each)}", shape, DTYPES[kind])
        if start != end:
            yield f"{place}.{shown(each)} begins at {start}, not at {end}, where the tensor before it ends"
        end = start + math.prod(shape) * DTYPES[kind].itemsize
    if end != entry["bytes"] or not entry["tensors"]:
        yield f"{place}.bytes is {entry['bytes']}, but its tensors end at {shown(end)}"


def _in_order(tensors: Mapping[str, Any]) -> list[tuple[str, Any]]:
    # One without elements takes no bytes: another one begins where it does.
    return sorted(tensors.items(), key=lambda item: (item[1][2], math.prod(item[1][1])))


def _sizes(place: str, shape: list[int], dtype: torch.dtype) -> Iterator[str]:
    if len(shape) > 64 or math.prod(max(size, 1) for size in shape) * dtype.itemsize > MAX_INT:
        yield f"{place} has a shape that no tensor can have"


def _numbering(stem: str, numbered: Mapping[int, str]) -> Iterator[str]:
    count = len(numbered)
    wanted = {f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}
    for file in sorted(set(numbered.values()) ^ wanted):
        yield f"content.files: `{file}` is {'missing' if file in wanted else 'too many'}"


def _optimizer(optimizer: Mapping[str, Any] | None, tensors: Mapping[str, Any]) -> Iterator[str]:
    place = "content.optimizer"
    if optimizer is None:
        yield from (f"{place} is null, but has tensors: {shown(each)}" for each in tensors)
        return
    members = [member for group in optimizer["param_groups"] for member in group["params"]]
    if sorted(members) != sorted(optimizer["parameters"]):
        yield f"{place}: the parameters of its groups differ from its parameters"
    yield from (
        f"{place}.state.{shown(each)} belongs to no parameter" for each in optimizer["state"] if each not in members
    )
    rest = optimizer["rest"]
    if not isinstance(rest, dict) or (next(iter(rest), "!dict").startswith("!") and rest.keys() - {"!dict"}):
        yield f"{place}.rest is {shown(rest)}, not the further entries of a state dict"
    values = [("param_groups", optimizer["param_groups"]), ("rest", rest)]
    state = [(f"{each}.{key}", item) for each, held in optimizer["state"].items() for key, item in held.items()]
    yield from _refer([*state, *values], tensors)


def _refer(values: Iterable[tuple[str, Any]], tensors: Mapping[str, Any]) -> Iterator[str]:
    """Each tensor appears once, at the path that is its name; the second of a name has a prime."""
    found: set[str] = set()
    for key, item in values:
        for place, is_known, each, is_array in tensor_places(item, key):
            behind = each[len(place) :] if is_known else "'"
            if not each.startswith(place) or behind.strip("'") or each in found or each not in tensors:
                yield f"`{place[:200]}` is the tensor {shown(each)}, but another tensor is stored for it"
            elif is_array and tensors[each][0] in _NO_ARRAYS:
                yield f"`{place[:200]}` is an array of {tensors[each][0]}"
            found.add(each)
    yield from (f"the tensor {shown(each)} is used nowhere" for each in tensors if each not in found)
