"""Shards: tensors laid out in safetensors files, written one after the other, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path

from megatrain.errors import CheckpointError
from megatrain.files import disk
from megatrain.files.disk import KINDS, Digest, Source, bytes_of, digest_of
from megatrain.saving.manifest import FileRecord, TensorRecord

_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that is going to be written.

    Args:
        file: Its path inside the checkpoint.
        header: All in front of the first tensor.
        sources: Its tensors by name, in the order of the file.
    """

    file: str
    header: bytes = field(repr=False)
    sources: Mapping[str, Source] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.header) + sum(source.spec.nbytes for source in self.sources.values())

    def record(self, digests: Mapping[str, str]) -> FileRecord:
        """The manifest's entry for it; unknown digests leave room for themselves."""
        start, tensors = len(self.header), dict[str, TensorRecord]()
        for name, source in self.sources.items():
            tensors[name] = TensorRecord.of(source.spec, start, digests.get(name, _NO_DIGEST))
            start += source.spec.nbytes
        return FileRecord(self.nbytes, len(self.header), digest_of(self.header), tensors)

    def write(self, folder: Path) -> FileRecord:
        """Writes and syncs the file.

        Raises:
            CheckpointError: If the values of a source don't fit its spec.
            OSError: If the disk refuses.
        """
        path = folder / self.file
        digests: dict[str, str] = {}
        with path.open("xb", buffering=0) as file:
            disk.write(file, memoryview(self.header))
            for name, source in self.sources.items():
                digests[name] = _write(file, name, source)
            disk.sync(file)
        return self.record(digests)


def _write(file: RawIOBase, name: str, source: Source) -> str:
    digest, left = Digest(), source.spec.nbytes
    try:
        for piece in source.pieces():
            left -= piece.nbytes
            if left < 0 or piece.dtype != source.spec.dtype:
                break
            view = bytes_of(piece)
            digest.begin(view)
            disk.write(file, view)
            digest.wait()
    finally:
        digest.close()
    if left:
        raise CheckpointError(
            f"the source of `{name}` gives other values than its spec {source.spec}: {-left:+} B.\n"
            "  A file's layout is fixed before the first value is written.\n"
            "  Give a source whose pieces together have exactly the size of its spec."
        )
    return digest.finish()


def shards(stem: str, sources: Mapping[str, Source], shard_bytes: int) -> list[Shard]:
    """Lays tensors out in files of at most `shard_bytes`, or of one larger tensor.

    Args:
        stem: Path of the files inside the checkpoint, without number and ending.
        sources: By name; neighbours share a file.
        shard_bytes: Limit of a file in bytes, header not counted.
    """
    groups: list[dict[str, Source]] = []
    room = 0
    for name, source in sources.items():
        if not groups or source.spec.nbytes > room:
            groups.append({})
            room = shard_bytes
        groups[-1][name] = source
        room -= source.spec.nbytes
    return [_shard(f"{stem}-{i:05}-of-{len(groups):05}.safetensors", group) for i, group in enumerate(groups, 1)]


def _shard(file: str, sources: Mapping[str, Source]) -> Shard:
    # The largest elements first, as the library does: each tensor is then aligned to its elements.
    ordered = dict(sorted(sources.items(), key=lambda item: (-item[1].spec.dtype.itemsize, item[0])))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, source in ordered.items():
        end = offset + source.spec.nbytes
        kind = KINDS[source.spec.dtype]
        entries[name] = {"dtype": kind, "shape": list(source.spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Shard(file, len(text).to_bytes(8, "little") + text, ordered)
