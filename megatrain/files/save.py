"""Save: writes a whole training to a folder, which is replaced as a whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from megatrain.base.checks import PATH, Rule, checked, optional
from megatrain.base.checks.several_optimizers import OPTIMIZERS, Optimizers
from megatrain.base.counts import counted
from megatrain.base.sizes import SIZE, format_bytes, parse_bytes
from megatrain.errors import CheckpointError
from megatrain.files import disk
from megatrain.files.disk import KINDS, Digest, Source, bytes_of, digest_of, obstacle, without_ties
from megatrain.files.manifest import FILE, INDEX, TRAINING, Encoder, FileRecord, Manifest, TensorRecord, WeightFiles
from megatrain.files.optimizers import OptimizerState
from megatrain.files.replace import replaced, resolved

_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that is going to be written."""

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
                digests[name] = _write_tensor(file, name, source)
            disk.sync(file)
        return self.record(digests)


def _write_tensor(file: RawIOBase, name: str, source: Source) -> str:
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
        digest.wait()
    if left:
        raise CheckpointError(
            f"the source of `{name}` gives other values than its spec {source.spec}: {-left:+} B.\n"
            "  A file's layout is fixed before the first value is written.\n"
            "  Give a source whose pieces together have exactly the size of its spec."
        )
    return digest.finish()


def shards(stem: str, sources: Mapping[str, Source], shard_bytes: int) -> list[Shard]:
    """Lays tensors out in files of at most `shard_bytes`, headers not counted, or of one larger tensor.

    Neighbours share a file. The stem is a path inside the checkpoint, without number and ending.
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


# -- a checkpoint ----------------------------------------------------------------------------------------------------

_FILE_OVERHEAD = 8192
"""What a file takes on the disk beyond its bytes, at most: a block that isn't full, and its entry."""
Write = Callable[[Sequence[Shard], Path], Mapping[str, FileRecord]]
"""Writes files into a folder; returns their entries of the manifest."""
_STATE = Rule(
    f"{OPTIMIZERS.text}, or an OptimizerState",
    OPTIMIZERS.way,
    lambda value: None if isinstance(value, OptimizerState) else OPTIMIZERS.fault(value),
)


@checked(folder=PATH, optimizer=optional(_STATE), shard_bytes=SIZE)
def save(
    folder: str | os.PathLike[str],
    weights: Mapping[str, torch.Tensor | Source],
    *,
    optimizer: Optimizers | OptimizerState | None = None,
    names: Mapping[str, torch.Tensor] | None = None,
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor | Source] | None = None,
    shard_bytes: int | str = "5GB",
    more: Callable[[Path], object] | None = None,
) -> None:
    """Writes a checkpoint; at each moment a complete one is at `folder`, or next to it where `load` finds it.

    Args:
        folder: The folder to write. An existing checkpoint is replaced when the new one is complete.
        weights: Tensors by name, on any device. Names for the same memory are stored once, under the first.
        optimizer: Its state is stored by the names of its parameters. Or a list of several, which share no parameter.
        names: The optimizer's parameters by name; None takes `weights`, if these are the parameters themselves.
        extra: Values that `load` gives back: None, numbers, texts, tensors, arrays, and dicts, lists, tuples and
            Counters of these.
        tensors: Further training state, too large to be read all at once, such as `compiled.masters.sources()`:
            `Checkpoint.tensors` gives each tensor by itself.
        shard_bytes: Largest size of a file, in bytes or as `"5GB"`; a larger tensor gets its own file.
        more: Called with the folder being written, to add files of its own, such as
            `model.config.save_pretrained`.

    Raises:
        CheckpointError: If something can't be stored (all of it in one error, before anything is written), the
            disk is too full or fails, or `folder` isn't a checkpoint. The previous checkpoint is still complete then.
        OptionError: If an argument has a wrong value.
        OptimizerError: If two optimizers hold the same parameter.
    """
    CheckpointDraft.of(weights, optimizer, names, extra, tensors or {}, shard_bytes).save(folder, more)


def write_here(shards: Sequence[Shard], folder: Path) -> Mapping[str, FileRecord]:
    """Writes files with tensors one after the other; returns their entries of the manifest."""
    return {shard.file: shard.write(folder) for shard in shards}


@dataclass(frozen=True, slots=True)
class CheckpointDraft:
    """Everything that will be written; tensors are not read yet."""

    weights: Sequence[Shard]
    ties: Mapping[str, str]
    training: Sequence[Shard]
    values: Sequence[Shard]
    optimizer: Any
    extra: Any

    @staticmethod
    def of(
        weights: Mapping[str, torch.Tensor | Source],
        optimizer: Optimizers | OptimizerState | None,
        names: Mapping[str, torch.Tensor] | None,
        extra: Mapping[str, Any] | None,
        tensors: Mapping[str, torch.Tensor | Source],
        shard_bytes: int | str,
    ) -> CheckpointDraft:
        """Lays the files out; the arguments are those of `save`.

        Raises:
            CheckpointError: If something can't be stored.
        """
        largest = parse_bytes(shard_bytes, "shard_bytes")
        sources, problems = _sources(weights)
        apart, others = _sources(tensors)
        stored, ties = without_ties(sources)
        if optimizer is not None and not isinstance(optimizer, OptimizerState):
            known = {name: t for name, t in weights.items() if isinstance(t, torch.Tensor)}
            optimizer = OptimizerState.of(optimizer, known if names is None else names)
        moments, values = Encoder(), Encoder()
        state = None if optimizer is None else optimizer.encode(moments)
        encoded = {key: values.encode(value, str(key)) for key, value in (extra or {}).items()}
        problems += [
            f"{key!r} is the name of an extra value, but isn't text" for key in encoded if type(key) is not str
        ]
        problems += [*others, *moments.problems, *values.problems]
        for named in (stored, moments.tensors, values.tensors, apart):
            problems += [
                f"`{ascii(str(name))[1:-1]}` isn't a name that files can hold" for name in named if not _is_name(name)
            ]
        if problems:
            lines = [
                f"{counted(len(problems), 'value')} can't be stored in a checkpoint.",
                *problems,
                "A checkpoint can hold None, numbers, texts, strided tensors, arrays, and dicts, lists, tuples, "
                "Counters of these.",
                "Store the values of such an object instead, for example its state_dict() or float(value).",
            ]
            raise CheckpointError("\n  ".join(lines))
        training = [
            *shards(f"{TRAINING}/optimizer", moments.tensors, largest),
            *shards(f"{TRAINING}/tensors", apart, largest),
        ]
        own = shards(f"{TRAINING}/extra", values.tensors, largest)
        draft = CheckpointDraft(shards("model", stored, largest), ties, training, own, state, encoded)
        _check(draft.empty_manifest())
        return draft

    def save(
        self, folder: str | os.PathLike[str], more: Callable[[Path], object] | None, write: Write = write_here
    ) -> None:
        """Writes it; see `save`."""
        place = resolved(folder)
        if place.exists() and not (place.is_dir() and (Path(place, FILE).exists() or not any(place.iterdir()))):
            raise CheckpointError(
                f"`{place}` exists and isn't a checkpoint.\n  Saving replaces the folder as a whole.\n"
                "  Give a folder that doesn't exist, or remove this one."
            )
        lowest = next(parent for parent in place.parents if parent.exists())
        if not lowest.is_dir():
            raise CheckpointError(
                f"`{lowest}` is a file, so `{place}` can't be inside it.\n  A checkpoint is a folder inside a folder.\n"
                "  Give another one."
            )
        try:
            with replaced(place) as partial:
                if more is not None:
                    more(partial)
                _write(self, partial, place, write)
        except OSError as error:
            raise CheckpointError(
                f"saving to `{place}` failed: {error}.\n"
                f"  It needs {format_bytes(self.nbytes)} ({self.nbytes} B) in addition to existing files.\n"
                "  A previous checkpoint is still complete. Free some space, or save to another disk."
            ) from error

    @property
    def shared(self) -> Sequence[Shard]:
        """The files with weights and training state."""
        return [*self.weights, *self.training]

    @property
    def _shards(self) -> Sequence[Shard]:
        return [*self.shared, *self.values]

    @property
    def index(self) -> bytes:
        """The index that readers of sharded weights expect."""
        total = sum(source.spec.nbytes for shard in self.weights for source in shard.sources.values())
        listed = {name: shard.file for shard in self.weights for name in shard.sources}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": listed}, indent=2).encode()

    @property
    def nbytes(self) -> int:
        """Bytes of all files, the manifest included, with an allowance for the file system."""
        files = [*(shard.nbytes for shard in self._shards), len(self.index), len(self.empty_manifest().text())]
        return sum(files) + _FILE_OVERHEAD * len(files)

    def empty_manifest(self) -> Manifest:
        """The manifest, without files of the caller and with room for checksums."""
        records = {shard.file: shard.record({}) for shard in self._shards}
        return self.manifest({**records, INDEX: _text_record(self.index)})

    def manifest(self, files: Mapping[str, FileRecord]) -> Manifest:
        """The manifest with these entries."""
        weights = WeightFiles(tuple(shard.file for shard in self.weights), dict(self.ties))
        return Manifest(files=dict(files), weights=weights, optimizer=self.optimizer, extra=self.extra)


def _is_name(name: str) -> bool:
    # safetensors keeps one for itself.
    is_text = isinstance(name, str) and not any("\ud800" <= letter <= "\udfff" for letter in name)  # pyright: ignore
    return is_text and name != "__metadata__"


def _sources(weights: Mapping[str, torch.Tensor | Source]) -> tuple[dict[str, Source], list[str]]:
    sources: dict[str, Source] = {}
    problems: list[str] = []
    for name, value in weights.items():
        problem = obstacle(value) if isinstance(value, torch.Tensor) else None
        if problem is not None:
            problems.append(f"`{name}` {problem}")
        else:
            sources[name] = Source.of(value) if isinstance(value, torch.Tensor) else value
    return sources, problems


def _check(manifest: Manifest) -> None:
    """Refuses everything that `load` would refuse: a name that no file can hold, a name twice."""
    try:
        manifest.check()
    except ValueError as error:
        raise CheckpointError(
            f"the manifest can't be stored in a checkpoint: {error}.\n"
            "  Only a manifest that can be read again is written.\n  Use other names."
        ) from error


def _write(draft: CheckpointDraft, partial: Path, place: Path, write: Write) -> None:
    files = {path: _record(partial / path) for path in _added(draft, partial)}
    free = shutil.disk_usage(partial).free
    if draft.nbytes > free:
        raise CheckpointError(
            f"saving to `{place}` needs {format_bytes(draft.nbytes)} ({draft.nbytes} B), "
            f"the disk has {format_bytes(free)} ({free} B).\n"
            "  The new checkpoint must be complete before the previous one is removed.\n"
            "  The previous checkpoint is still complete. Free some space, or save to another disk."
        )
    if draft.training or draft.values:
        disk.make(partial / TRAINING)
    files |= {**write(draft.shared, partial), **write_here(draft.values, partial)}
    files[INDEX] = _write_text(partial / INDEX, draft.index)
    # The last file: a folder without it isn't a checkpoint.
    _write_text(partial / FILE, draft.manifest(files).text())


def _write_text(path: Path, text: bytes) -> FileRecord:
    with path.open("xb", buffering=0) as file:
        disk.write(file, memoryview(text))
        disk.sync(file)
    return _text_record(text)


def _text_record(text: bytes) -> FileRecord:
    """The manifest's entry for a file without tensors."""
    return FileRecord(len(text), len(text), digest_of(text), {})


def _record(path: Path) -> FileRecord:
    """Describes a file that `more` wrote, and syncs it."""
    with path.open("rb", buffering=0) as file:
        content = file.readall()
        disk.sync(file)
    return _text_record(content)


def _added(draft: CheckpointDraft, partial: Path) -> list[str]:
    found = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    ours = {FILE, INDEX, *(shard.file for shard in draft._shards)}
    taken = [path for path in found if path in ours or path.endswith(".safetensors") or path.split("/")[0] == TRAINING]
    if taken:
        raise CheckpointError(
            f"more= wrote {', '.join(f'`{path}`' for path in taken)}, which belongs to the checkpoint itself.\n"
            "  Readers would take these files for weights.\n  Write such files to another folder."
        )
    return found
