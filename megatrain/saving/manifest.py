"""Manifest: the JSON that lists the contents of a checkpoint, with checksums for every byte and for itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import torch

from megatrain.checks import shown
from megatrain.errors import CheckpointError
from megatrain.files.disk import KINDS, digest_of
from megatrain.files.json_file import Count, is_inside, of_kind, parse_json, read_json
from megatrain.files.weight_files import DTYPES
from megatrain.tracer.spec import TensorSpec

FILE = "checkpoint.json"
INDEX = "model.safetensors.index.json"
TRAINING = "training"
"""Folder of what is no weight, so that readers of weights don't meet it."""
NEWEST = 2
"""1: no version of torch, no scheduler's class; its number is under no checksum."""
READABLE = (1, NEWEST)

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
        nbytes: Its size.
        header_bytes: Size of the bytes before the first tensor; the size of a file without tensors.
        digest: The SHA-256 of those bytes.
        tensors: The tensors after the header, by name.
    """

    nbytes: Count
    header_bytes: Count
    digest: _Digest
    tensors: dict[str, TensorRecord]

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON."""
        return msgspec.to_builtins(self)

    @staticmethod
    def of_json(entry: Any) -> FileRecord:
        """Reads a result of `to_json`."""
        return of_kind(entry, FileRecord, "record")

    def fits(self, header: bytes) -> bool:
        """Tells whether the header of the file, which other readers go by, says the same of each tensor."""
        try:
            listed = parse_json(header[8:])
        except ValueError:
            return False
        first = self.header_bytes
        tensors = {
            name: {
                "dtype": KINDS[record.spec.dtype],
                "shape": list(record.spec.shape),
                "data_offsets": [record.start - first, record.start + record.spec.nbytes - first],
            }
            for name, record in self.tensors.items()
        }
        is_whole = int.from_bytes(header[:8], "little") == first - 8
        return is_whole and {**tensors, "__metadata__": {"format": "pt"}} == listed


class _WeightFiles(msgspec.Struct, forbid_unknown_fields=True):
    files: tuple[str, ...]
    ties: dict[str, str]


class _Group(TypedDict):
    params: list[str]


class _Optimizer(msgspec.Struct, forbid_unknown_fields=True, rename={"kind": "class"}):
    kind: str
    parameters: dict[str, str]
    param_groups: list[_Group]
    state: dict[str, dict[str, Any]]
    rest: dict[str, Any]


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    files: dict[str, FileRecord]
    weights: _WeightFiles
    optimizer: _Optimizer | None
    extra: dict[str, Any]
    torch: str | None = None


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    schema: Count
    sha256: _Digest
    content: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a checkpoint.

    Args:
        files: By path inside the checkpoint.
        weights: The files with weights.
        ties: For each name that is stored under another name: the other name.
        optimizer: The optimizer's state as JSON, or None.
        extra: The caller's values as JSON.
        schema: As which it was written; see `NEWEST`.
        torch_version: Of the process that wrote it; None if that isn't known.
    """

    files: Mapping[str, FileRecord]
    weights: tuple[str, ...]
    ties: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    extra: Mapping[str, Any]
    schema: int = NEWEST
    torch_version: str | None = str(torch.__version__)

    def content(self) -> dict[str, Any]:
        """Returns all but the checksum as JSON, as the newest schema has it."""
        return {
            "torch": self.torch_version,
            "files": {name: record.to_json() for name, record in self.files.items()},
            "weights": {"files": list(self.weights), "ties": dict(self.ties)},
            "optimizer": self.optimizer,
            "extra": self.extra,
        }

    def text(self) -> bytes:
        """Returns the JSON; its length depends on the length of names and values only."""
        content = self.content()
        return _dump({"schema": NEWEST, "sha256": _digest(NEWEST, content), "content": content})

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            CheckpointError: If there is none, or it is damaged, of another schema, or invalid.
        """
        path = folder / FILE
        try:
            document = read_json(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f"`{folder}` isn't a checkpoint: it has no {FILE}.\n"
                "  A checkpoint is a folder that megatrain.saving.save wrote.\n"
                "  Give that folder; weights alone are read with megatrain.compile(weights=...)."
            ) from error
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        envelope = _of_kind(document, _Document, "it", path)
        schema, content = envelope.schema, envelope.content
        if schema not in READABLE:
            raise CheckpointError(
                f"`{path}` has schema {schema}; this version of megatrain reads {' and '.join(map(str, READABLE))}.\n"
                "  The schema says how to read the rest of the file.\n"
                "  Load it with the version that wrote it. Every version can read the weights, which are "
                "safetensors files."
            )
        if _digest(schema, content) != envelope.sha256:
            raise _damaged(path, "its checksum differs")
        found = _of_kind(content, _Content, "content", path)
        manifest = Manifest(
            found.files,
            found.weights.files,
            found.weights.ties,
            content["optimizer"],
            content["extra"],
            schema,
            found.torch,
        )
        fault = manifest.fault()
        if fault is not None:
            raise _damaged(path, fault)
        return manifest

    def fault(self) -> str | None:
        """What contradicts itself: a file elsewhere or missing, a tie to no weight, a parameter that isn't known."""
        outside = next((file for file in self.files if not is_inside(file) or file == FILE), None)
        if outside is not None:
            return f"{shown(outside)} isn't the name of a file in this folder"
        missing = next((file for file in (*self.weights, INDEX) if file not in self.files), None)
        if missing is not None:
            return f"{shown(missing)} isn't among its files"
        stored = {name for file in self.weights for name in self.files[file].tensors}
        tie = next((tie for tie, first in self.ties.items() if tie in stored or first not in stored), None)
        if tie is not None:
            return f"{shown(tie)} isn't another name of a weight"
        saved = self.optimizer or {"param_groups": [], "parameters": {}, "state": {}}
        members = [member for group in saved["param_groups"] for member in group["params"]]
        if sorted(members) != sorted(saved["parameters"]) or not set(saved["state"]) <= set(members):
            return "the parameters of the optimizer's groups differ from its parameters"
        return None


def _digest(schema: int, content: Any) -> str:
    """The checksum; the first schema had none of its own number."""
    return digest_of(_dump(content if schema == 1 else [schema, content]))


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _of_kind(value: Any, kind: Any, place: str, path: Path) -> Any:
    try:
        return of_kind(value, kind, place)
    except ValueError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"`{path}` is damaged: {reason}.\n  Without this file the contents of the checkpoint are unknown.\n"
        "  Copy it again, or load an older checkpoint."
    )
