"""Manifest: the JSON that lists the contents of a checkpoint, with checksums for every byte and for itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.counts import counted
from megatrain.errors import CheckpointError
from megatrain.files.byte_source import KINDS
from megatrain.files.digest import digest_of
from megatrain.files.json_rules import parse_json, problems, read_json
from megatrain.files.weight_files import DTYPES
from megatrain.saving.schema import ENVELOPE, FILE, NEWEST, READABLE, faults
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One stored tensor: its shape and dtype, its first byte from the start of the file, the SHA-256 of its bytes."""

    spec: TensorSpec
    start: int
    digest: str

    def to_json(self) -> list[Any]:
        """Returns kind, shape, start and digest."""
        return [KINDS[self.spec.dtype], list(self.spec.shape), self.start, self.digest]

    @staticmethod
    def of_json(entry: list[Any]) -> TensorRecord:
        """Reads a result of `to_json`."""
        kind, shape, start, digest = entry
        return TensorRecord(TensorSpec(tuple(shape), DTYPES[kind]), start, digest)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One stored file.

    Args:
        nbytes: Its size.
        header_bytes: Size of the bytes before the first tensor; the size of a file without tensors.
        digest: The SHA-256 of those bytes.
        tensors: The tensors after the header, by name.
    """

    nbytes: int
    header_bytes: int
    digest: str
    tensors: Mapping[str, TensorRecord]

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON."""
        tensors = {name: record.to_json() for name, record in self.tensors.items()}
        return {"bytes": self.nbytes, "header_bytes": self.header_bytes, "sha256": self.digest, "tensors": tensors}

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

    @staticmethod
    def of_json(entry: Mapping[str, Any]) -> FileRecord:
        """Reads a result of `to_json`."""
        tensors = {name: TensorRecord.of_json(record) for name, record in entry["tensors"].items()}
        return FileRecord(entry["bytes"], entry["header_bytes"], entry["sha256"], tensors)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint.

    Args:
        files: By path inside the checkpoint.
        weights: The files with weights.
        ties: For each name that is stored under another name: the other name.
        optimizer: The optimizer's state as JSON, or None.
        extra: The caller's values as JSON.
        schema: As which it was written; see `schema.py`.
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
        _check(path, problems(ENVELOPE, document, "it"))
        schema, content = document["schema"], document["content"]
        if schema not in READABLE:
            raise CheckpointError(
                f"`{path}` has schema {schema}; this version of megatrain reads {' and '.join(map(str, READABLE))}.\n"
                "  The schema says how to read the rest of the file.\n"
                "  Load it with the version that wrote it. Every version can read the weights, which are "
                "safetensors files."
            )
        if _digest(schema, content) != document["sha256"]:
            raise _damaged(path, "its checksum differs")
        _check(path, faults(content, schema))
        return Manifest(
            {name: FileRecord.of_json(entry) for name, entry in content["files"].items()},
            tuple(content["weights"]["files"]),
            content["weights"]["ties"],
            content["optimizer"],
            content["extra"],
            schema,
            content.get("torch"),
        )


def _digest(schema: int, content: Any) -> str:
    """The checksum; the first schema had none of its own number."""
    return digest_of(_dump(content if schema == 1 else [schema, content]))


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _check(path: Path, found: list[str]) -> None:
    if found:
        lines = [
            f"`{path}` is damaged: {counted(len(found), 'place')} that no save writes.",
            *found,
            "Every field is checked, even if the checksum is right.",
            "Copy the checkpoint again, or load an older one.",
        ]
        raise CheckpointError("\n  ".join(lines))


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"`{path}` is damaged: {reason}.\n  Without this file the contents of the checkpoint are unknown.\n"
        "  Copy it again, or load an older checkpoint."
    )
