"""Manifest: the JSON that lists the contents of a checkpoint, with checksums for every byte; Python values in it."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

import msgspec
import numpy as np
import torch

from megatrain.base.checks import shown
from megatrain.errors import CheckpointError
from megatrain.files.disk import KINDS, Source, digest_of, obstacle
from megatrain.files.json_file import Count, is_inside, of_kind, read_json
from megatrain.files.weight_files import DTYPES
from megatrain.tracer.spec import TensorSpec

FILE = "checkpoint.json"
INDEX = "model.safetensors.index.json"
TRAINING = "training"
"""Folder of what is no weight, so that readers of weights don't meet it."""
SCHEMA = 2
"""One more whenever a field means something else than before."""

_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class TensorRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stored tensor: dtype and shape, its first byte from the start of the file, the SHA-256 of its bytes."""

    kind: str
    shape: tuple[Count, ...]
    start: Count
    digest: _Digest

    def __post_init__(self) -> None:
        if self.kind not in DTYPES:
            raise ValueError(f"{shown(self.kind)} is no kind of tensor")

    @property
    def spec(self) -> TensorSpec:
        """Its shape and dtype."""
        return TensorSpec(self.shape, DTYPES[self.kind])

    @staticmethod
    def of(spec: TensorSpec, start: int, digest: str) -> TensorRecord:
        """The record of a tensor."""
        return TensorRecord(KINDS[spec.dtype], tuple(spec.shape), start, digest)


class FileRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"nbytes": "bytes", "digest": "sha256"}
):
    """One stored file.

    Args:
        header_bytes: Size of the bytes before the first tensor; the size of a file without tensors.
        digest: The SHA-256 of those bytes.
    """

    nbytes: Count
    header_bytes: Count
    digest: _Digest
    tensors: dict[str, TensorRecord]


class WeightFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files with weights; for each name that is stored under another name: the other name."""

    files: tuple[str, ...]
    ties: dict[str, str]


_Optimizer = TypedDict(
    "_Optimizer",
    {
        "class": str,
        "parameters": dict[str, str],
        "param_groups": list[dict[str, Any]],
        "state": dict[str, dict[str, Any]],
        "rest": dict[str, Any],
    },
)


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    schema: Count
    sha256: _Digest
    content: dict[str, Any]


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"torch_version": "torch"}
):
    """The contents of a checkpoint, and the version of torch in the process that wrote it."""

    torch_version: str = str(torch.__version__)
    files: dict[str, FileRecord]
    weights: WeightFiles
    optimizer: _Optimizer | None
    extra: dict[str, Any]

    def text(self) -> bytes:
        """Returns the JSON; its length depends on the length of names and values only."""
        content = msgspec.to_builtins(self)
        return _dump({"schema": SCHEMA, "sha256": _digest(content), "content": content})

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            CheckpointError: If there is none, or it is damaged, of another schema, or invalid.
        """
        path = folder / FILE
        try:
            envelope = of_kind(read_json(path), _Document, "it")
            if envelope.schema != SCHEMA:
                raise CheckpointError(
                    f"`{path}` has schema {envelope.schema}; this version of megatrain reads {SCHEMA}.\n"
                    "  The schema says how to read the rest of the file.\n"
                    "  Load it with the version that wrote it. Every version can read the weights, which are "
                    "safetensors files."
                )
            if _digest(envelope.content) != envelope.sha256:
                raise ValueError("its checksum differs")
            manifest = of_kind(envelope.content, Manifest, "content")
            manifest.check()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f"`{folder}` isn't a checkpoint: it has no {FILE}.\n"
                "  A checkpoint is a folder that megatrain.files.save wrote.\n"
                "  Give that folder; weights alone are read with megatrain.compile(weights=...)."
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"`{path}` is damaged: {error}.\n  Without this file the contents of the checkpoint are unknown.\n"
                "  Copy it again, or load an older checkpoint."
            ) from error
        return manifest

    def check(self) -> None:
        """Looks for what contradicts itself.

        Raises:
            ValueError: If a file is elsewhere or missing, a tie is of no weight, or a parameter isn't known.
        """
        outside = next((file for file in self.files if not is_inside(file) or file == FILE), None)
        if outside is not None:
            raise ValueError(f"{shown(outside)} isn't the name of a file in this folder")
        missing = next((file for file in (*self.weights.files, INDEX) if file not in self.files), None)
        if missing is not None:
            raise ValueError(f"{shown(missing)} isn't among its files")
        stored = {name for file in self.weights.files for name in self.files[file].tensors}
        tie = next((tie for tie, first in self.weights.ties.items() if tie in stored or first not in stored), None)
        if tie is not None:
            raise ValueError(f"{shown(tie)} isn't another name of a weight")
        saved = self.optimizer or {"param_groups": [], "parameters": {}, "state": {}}
        members = [member for group in saved["param_groups"] for member in group["params"]]
        if sorted(members) != sorted(saved["parameters"]) or not set(saved["state"]) <= set(members):
            raise ValueError("the parameters of the optimizer's groups differ from its parameters")


def _digest(content: Any) -> str:
    return digest_of(_dump([SCHEMA, content]))


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


MAX_DEPTH = 40
"""Values in one another; what walks through them does so by recursion."""

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
        """Returns JSON for a value: None, a number, text, tensor or array, or a dict, list, tuple or Counter of these.

        The path says where it is, for names of tensors and for problems.
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

    Raises:
        CheckpointError: If `encode` makes no such JSON, a tensor isn't stored, or its bytes are damaged.
    """
    try:
        return _decoded(encoded, lambda name: read(tensors[name]))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
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
