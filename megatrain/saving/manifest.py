"""Manifest: the JSON that says what a checkpoint holds, with a checksum for every byte of it and for itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import CheckpointError
from megatrain.runtime.checkpoint import DTYPES
from megatrain.saving.digest import digest_of
from megatrain.saving.source import KINDS
from megatrain.tracer.spec import TensorSpec

FILE = "checkpoint.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One stored tensor: what it is, its first byte from the start of the file, the SHA-256 of its bytes."""

    spec: TensorSpec
    start: int
    digest: str

    def to_json(self) -> list[Any]:
        """Returns kind, shape, start and digest."""
        return [KINDS[self.spec.dtype], list(self.spec.shape), self.start, self.digest]

    @staticmethod
    def of_json(entry: list[Any]) -> TensorRecord:
        """Reads what `to_json` returns."""
        kind, shape, start, digest = entry
        return TensorRecord(TensorSpec(tuple(shape), DTYPES[kind]), start, digest)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One stored file.

    Args:
        nbytes: Its size.
        header_bytes: Size of what lies in front of the first tensor; all of it for a file without tensors.
        digest: The SHA-256 of those bytes.
        tensors: What follows, by name.
    """

    nbytes: int
    header_bytes: int
    digest: str
    tensors: Mapping[str, TensorRecord]

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON."""
        tensors = {name: record.to_json() for name, record in self.tensors.items()}
        return {"bytes": self.nbytes, "header_bytes": self.header_bytes, "sha256": self.digest, "tensors": tensors}

    @staticmethod
    def of_json(entry: Mapping[str, Any]) -> FileRecord:
        """Reads what `to_json` returns."""
        tensors = {name: TensorRecord.of_json(record) for name, record in entry["tensors"].items()}
        return FileRecord(entry["bytes"], entry["header_bytes"], entry["sha256"], tensors)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        files: By path inside the checkpoint.
        weights: The files with weights.
        ties: For names that are stored under another one: that one.
        optimizer: The optimizer's state as JSON, or None.
        extra: The caller's values as JSON.
    """

    files: Mapping[str, FileRecord]
    weights: tuple[str, ...]
    ties: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    extra: Any

    def text(self) -> bytes:
        """Returns the JSON; its length depends on the length of names and values only."""
        content = {
            "files": {name: record.to_json() for name, record in self.files.items()},
            "weights": {"files": list(self.weights), "ties": dict(self.ties)},
            "optimizer": self.optimizer,
            "extra": self.extra,
        }
        return _dump({"schema": SCHEMA, "sha256": digest_of(_dump(content)), "content": content})

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            CheckpointError: If there is none, it is damaged, or of another schema.
        """
        path = folder / FILE
        try:
            document = json.loads(path.read_bytes())
            schema, digest, content = document["schema"], document["sha256"], document["content"]
        except FileNotFoundError as error:
            raise CheckpointError(
                f"`{folder}` is no checkpoint: it has no {FILE}.\n"
                "  A checkpoint is a folder that megatrain.saving.save wrote.\n"
                "  Give that folder; weights alone are read with megatrain.compile(weights=...)."
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, repr(error)) from error
        if schema != SCHEMA:
            raise CheckpointError(
                f"`{path}` has schema {schema!r}; this version of megatrain reads schema {SCHEMA}.\n"
                "  A schema says how the rest is to be understood.\n"
                "  Load it with the version that wrote it. The weights are in safetensors files that any version reads."
            )
        if digest_of(_dump(content)) != digest:
            raise _damaged(path, "its checksum is another one")
        return Manifest(
            {name: FileRecord.of_json(entry) for name, entry in content["files"].items()},
            tuple(content["weights"]["files"]),
            content["weights"]["ties"],
            content["optimizer"],
            content["extra"],
        )


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"`{path}` is damaged: {reason}.\n  Nothing else says what the checkpoint holds.\n"
        "  Copy it again, or load an older checkpoint."
    )
