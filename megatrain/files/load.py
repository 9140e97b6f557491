"""Load: a checkpoint is opened by its manifest and headers; values are read piece by piece, with their checksums."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import increment_version

from megatrain.base.checks import PATH, checked
from megatrain.base.checks.several_optimizers import OPTIMIZERS, Optimizers, check_apart, optimizers_of
from megatrain.base.counts import counted
from megatrain.device import is_on_host
from megatrain.device.host_arena import scratch
from megatrain.errors import CheckpointError
from megatrain.files.disk import Digest, Source, bytes_of, room_to_read
from megatrain.files.json_file import regular
from megatrain.files.manifest import TRAINING, FileRecord, Manifest, decoded
from megatrain.files.optimizers import destinations, differences, filled, misfitting_options, misfitting_rest, put_back
from megatrain.files.replace import present, resolved
from megatrain.files.weight_files import PIECE_BYTES, Maps, parts
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor in a file.

    Args:
        name: Its name there.
        file: The file.
        spec: Shape and dtype.
        start: Its first byte, from the start of the file.
        digest: SHA-256 of its bytes.
    """

    name: str
    file: Path
    spec: TensorSpec
    start: int
    digest: str

    def __str__(self) -> str:
        return f"{self.spec} in {self.file.name}"

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
        """Reads the values in the order of the elements.

        Args:
            piece_bytes: Size of a piece; the last one may be smaller.

        Yields:
            One-dimensional tensors on the CPU; the memory is used again for the next.

        Raises:
            CheckpointError: If the file can't be read, or, after the last piece, if the bytes are not those saved.
        """
        room = max(1, min(self.spec.numel, piece_bytes // self.spec.dtype.itemsize))
        buffer = scratch((room,), self.spec.dtype)
        with _Reader(self, piece_bytes) as reader:
            for start in range(0, self.spec.numel, room):
                piece = buffer[: min(room, self.spec.numel - start)]
                reader.fill(bytes_of(piece))
                reader.wait()
                yield piece

    def equals(self, tensor: torch.Tensor) -> bool:
        """Tells whether the values are those of a contiguous tensor on the CPU, bit for bit.

        Raises:
            CheckpointError: As `pieces`.
        """
        room = max(1, PIECE_BYTES // self.spec.dtype.itemsize)
        pairs = zip(self.pieces(), tensor.detach().reshape(-1).split(room), strict=True)
        return all([torch.equal(saved.view(torch.uint8), values.view(torch.uint8)) for saved, values in pairs])

    @room_to_read()
    def read(self, out: torch.Tensor) -> None:
        """Reads the values into a tensor; takes no memory beyond a piece.

        Args:
            out: Of this shape and dtype, on any device, with any strides.

        Raises:
            CheckpointError: As `pieces`; the values of `out` have changed then.
        """
        assert (tuple(out.shape), out.dtype) == (self.spec.shape, self.spec.dtype)
        target = out.detach()
        is_plain = is_on_host(target) and target.is_contiguous() and not target.is_conj() and not target.is_neg()
        with _Reader(self, PIECE_BYTES) as reader:
            for part in [target] if is_plain else parts(target, max(1, PIECE_BYTES // out.dtype.itemsize)):
                values = part if is_plain else scratch(part.shape, out.dtype)
                reader.fill(bytes_of(values))
                if not is_plain:
                    part.copy_(values)
        if is_plain and not out.is_inference():
            increment_version(out)  # numpy wrote to it, which autograd doesn't see

    def mapped(self, maps: Maps) -> torch.Tensor | None:
        """The values where they are, once they are compared with their checksum; None where they can't be used there.

        Raises:
            CheckpointError: As `pieces`.
        """
        found = maps.tensor(self.file, self.start, self.spec)
        if found is not None:
            self.check()
        return found

    def check(self) -> None:
        """Reads all and keeps nothing.

        Raises:
            CheckpointError: As `pieces`.
        """
        for _ in self.pieces():
            pass


class _Reader:
    """Reads a tensor from its first byte; at the end of the context its checksum must be the saved one."""

    def __init__(self, saved: Saved, piece_bytes: int) -> None:
        self._saved, self._piece_bytes = saved, piece_bytes
        self._digest = Digest()
        try:
            self._file = saved.file.open("rb", buffering=0)
        except OSError as error:
            raise self._failed(str(error)) from error
        self._file.seek(saved.start)

    def fill(self, target: memoryview) -> None:
        """Reads the next bytes; they may change after `wait`."""
        while len(target):
            try:
                count = self._file.readinto(target[: self._piece_bytes])
            except OSError as error:
                raise self._failed(str(error)) from error
            if not count:
                raise self._failed("the file ends too early")
            self._digest.begin(target[:count])
            target = target[count:]

    def wait(self) -> None:
        self._digest.wait()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        digest = self._digest.finish()
        if kind is None and digest != self._saved.digest:
            raise self._failed("its bytes differ from the saved ones")

    def _failed(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"`{self._saved.name}` in `{self._saved.file}` is damaged: {reason}.\n"
            "  Each tensor is compared with its checksum from the save.\n"
            "  Copy the file again, or load an older checkpoint. Tensors that were read before this one have new "
            "values already."
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk; only manifest and headers have been read.

    Args:
        folder: Its folder.
        manifest: Its list of contents.
    """

    folder: Path
    manifest: Manifest

    @cached_property
    def weights(self) -> Mapping[str, Saved]:
        """The weights by name; tied names give the same one."""
        stored = self._tensors(self.manifest.weights.files)
        return {**stored, **{name: stored[first] for name, first in self.manifest.weights.ties.items()}}

    @cached_property
    @room_to_read()
    def extra(self) -> dict[str, Any]:
        """The values that `save` was given, tensors included.

        Raises:
            CheckpointError: If their tensors can't be read.
        """
        stored = self._tensors(self._stem("extra"))
        return {key: decoded(value, stored, _fresh) for key, value in self.manifest.extra.items()}

    @cached_property
    def tensors(self) -> Mapping[str, Saved]:
        """The `tensors` of `save` by name; none has been read."""
        return self._tensors(self._stem("tensors"))

    @room_to_read()
    def check(self) -> None:
        """Reads every byte and compares it with its checksum.

        Raises:
            CheckpointError: Naming all files and tensors that are damaged.
        """
        stored = [saved for file in self.manifest.files for saved in self._tensors([file]).values()]
        problems = [problem for saved in stored for problem in _problems_of(saved)]
        _refuse(self.folder, problems)

    @checked()
    def check_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compares names, shapes and dtypes with those of the weights, and reads nothing.

        Args:
            tensors: As for `read_weights`.

        Raises:
            CheckpointError: Listing all differences.
        """
        problems = list(self._mismatches(tensors))
        if problems:
            lines = [
                f"the checkpoint doesn't fit these weights: {counted(len(problems), 'difference')}.",
                f"checkpoint: `{self.folder}`",
                *problems,
                "Names, shapes and dtypes must equal the saved ones.",
                "Build the model as it was when saved, or read single tensors with "
                "load(...).weights[name].read(tensor).",
            ]
            raise CheckpointError("\n  ".join(lines))

    @checked()
    @room_to_read()
    def read_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Reads the weights into the given tensors, one by one.

        Args:
            tensors: By name, on any device. All names of the checkpoint, and no others; of tied ones, any.

        Raises:
            CheckpointError: As `check_weights`, before anything is read; or if a tensor is damaged; the tensors before
                it have been read then.
        """
        read_weights(self, tensors)

    @checked(optimizer=OPTIMIZERS)
    @room_to_read()
    def check_optimizer(self, optimizer: Optimizers, names: Mapping[str, torch.Tensor]) -> None:
        """Compares class, groups and parameters with those of the optimizer that was saved, and reads nothing.

        Args:
            optimizer: As for `read_optimizer`.
            names: Its parameters by name.

        Raises:
            CheckpointError: If there is none, or the two differ, with all differences.
            OptimizerError: If two optimizers hold the same parameter.
        """
        saved, several = self.saved_optimizer(), optimizers_of(optimizer)
        check_apart(several, names.items())
        problems = differences(
            saved["class"], saved["parameters"], [g["params"] for g in saved["param_groups"]], several, names
        )
        if not problems:
            problems = misfitting_options(self.decoded("param_groups"), several, is_whole=self.is_of_this_torch)
            problems += misfitting_rest(self.decoded("rest"), several)
        if problems:
            lines = [
                f"the checkpoint doesn't fit this optimizer: {counted(len(problems), 'difference')}.",
                f"checkpoint: `{self.folder}`",
                *problems,
                "State fits only the same parameter in the same class of optimizer.",
                "Build the optimizer as it was when saved, or continue with a new optimizer.",
            ]
            raise CheckpointError("\n  ".join(lines))

    @checked(optimizer=OPTIMIZERS)
    @room_to_read()
    def read_optimizer(self, optimizer: Optimizers, names: Mapping[str, torch.Tensor]) -> None:
        """Continues with the saved state, options of groups included.

        Existing state with the saved shape and dtype is overwritten in place.

        Args:
            optimizer: Of the class that was saved, with the same parameters in the same groups, in any order. If
                several were saved, as many, in the same order.
            names: Its parameters by name.

        Raises:
            CheckpointError: As `check_optimizer`, before anything is read; or if a tensor is damaged.
        """
        read_optimizer(self, optimizer, names)

    @property
    def optimizer_tensors(self) -> Mapping[str, Saved]:
        """The tensors of the optimizer's state by name; none has been read."""
        return self._tensors(self._stem("optimizer"))

    @property
    def is_of_this_torch(self) -> bool:
        """Whether the same version of torch wrote it; another version may have fewer options."""
        return self.manifest.torch_version == str(torch.__version__)

    def decoded(self, field: str) -> Any:
        """The options of the optimizer's groups, or its `rest`; tensors in them are read, such as learning rates."""
        return decoded(self.saved_optimizer()[field], self.optimizer_tensors, _fresh)

    def saved_optimizer(self) -> Mapping[str, Any]:
        """The manifest's entry for the optimizer; a `CheckpointError` if there is none."""
        if self.manifest.optimizer is None:
            raise CheckpointError(
                f"`{self.folder}` has no state of an optimizer.\n  Training can't continue exactly without this "
                "state.\n"
                "  Read its weights only, or load a checkpoint that was saved with optimizer=."
            )
        return self.manifest.optimizer

    def _stem(self, kind: str) -> list[str]:
        return [file for file in self.manifest.files if file.startswith(f"{TRAINING}/{kind}-")]

    def _tensors(self, files: Iterable[str]) -> dict[str, Saved]:
        return {
            name: Saved(name, self.folder / file, record.spec, record.start, record.digest)
            for file in files
            for name, record in self.manifest.files[file].tensors.items()
        }

    def _mismatches(self, tensors: Mapping[str, torch.Tensor]) -> Iterable[str]:
        first = {**{name: name for name in self.weights}, **self.manifest.weights.ties}
        wanted = {first[name] for name in tensors if name in first}
        for name in (name for name in self.weights if first[name] not in wanted and name == first[name]):
            yield f"unexpected: `{name}` {self.weights[name]} is not among the tensors given"
        memory: dict[object, str] = {}
        for name, tensor in tensors.items():
            spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
            if name not in self.weights:
                yield f"missing: `{name}` {spec} is not in the checkpoint"
                continue
            saved = self.weights[name]
            if tensor.is_meta:
                yield f"without memory: `{name}` {spec} is on the meta device"
            elif spec != saved.spec:
                what = "shape" if spec.shape != saved.spec.shape else "dtype"
                yield f"{what}: `{name}` {saved}, but {spec} here"
            else:
                place = Source.of(tensor).place
                other = name if place is None else memory.setdefault(place, name)
                if self.weights[other].digest != saved.digest:
                    yield f"tied: `{name}` and `{other}` are one tensor here, but differ in the checkpoint"


@checked(folder=PATH)
@room_to_read()
def load(folder: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint: reads the manifest and the headers of its files, and no values.

    If a save was ended between its two renames, the new checkpoint, which is complete, is read from next to `folder`.

    Args:
        folder: The folder given to `save`.

    Raises:
        CheckpointError: If it isn't there or of another schema, or files are missing, cut off, or have other headers:
            all in one error.
        OptionError: If `folder` isn't a path.
    """
    place = present(resolved(folder))
    manifest = Manifest.read(place)
    _refuse(place, [p for file, record in manifest.files.items() for p in _problems_of_file(place / file, record)])
    return Checkpoint(place, manifest)


def read_weights(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], as_is: Collection[str] = ()) -> None:
    """Reads the weights as `Checkpoint.read_weights`.

    Args:
        checkpoint: Where they are.
        tensors: By name.
        as_is: Names of contiguous ones on the CPU that are written only where they have other values: a write takes
            memory.
    """
    checkpoint.check_weights(tensors)
    done: set[object] = set()
    for name, tensor in tensors.items():
        place = Source.of(tensor).place
        if place is None or place not in done:
            if name not in as_is or not checkpoint.weights[name].equals(tensor):
                checkpoint.weights[name].read(tensor)
            done.add(place)


def read_optimizer(
    checkpoint: Checkpoint, optimizer: Optimizers, names: Mapping[str, torch.Tensor], maps: Maps | None = None
) -> None:
    """Reads the optimizer's state as `Checkpoint.read_optimizer`; what it has no memory for yet stays in the files.

    Args:
        checkpoint: Where it is.
        optimizer: One or several.
        names: Parameters by name.
        maps: Takes what stays in the files; None for nothing.
    """
    checkpoint.check_optimizer(optimizer, names)
    stored = checkpoint.optimizer_tensors
    existing = destinations(several := optimizers_of(optimizer), names)
    state = {
        name: {
            key: _state(value, stored, existing.get((name, key)), f"{name}.{key}", maps)
            for key, value in values.items()
        }
        for name, values in checkpoint.saved_optimizer()["state"].items()
    }
    put_back(several, names, checkpoint.decoded("param_groups"), state, checkpoint.decoded("rest"))


def _problems_of_file(path: Path, record: FileRecord) -> Iterable[str]:
    try:
        if not regular(path):
            yield f"`{path}` is no file"
            return
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.nbytes:
                gone = [name for name, tensor in record.tensors.items() if tensor.start + tensor.spec.nbytes > size]
                lost = f": {_listed(gone)}" if gone else ""
                yield f"`{path}` has {size} B, not {record.nbytes} B{lost}"
                return
            digest, left = Digest(), record.header_bytes
            while left and (piece := file.read(min(left, PIECE_BYTES))):
                digest.begin(memoryview(piece))
                left -= len(piece)
    except OSError as error:
        yield f"`{path}` can't be read: {error.strerror}"
        return
    if digest.finish() != record.digest:
        yield f"`{path}` has {'a header' if record.tensors else 'content'} that differs from the saved one"


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more


def _problems_of(saved: Saved) -> Iterable[str]:
    try:
        saved.check()
    except CheckpointError as error:
        yield str(error).split("\n", 1)[0]


def _refuse(folder: Path, problems: Sequence[str]) -> None:
    if problems:
        lines = [
            f"the checkpoint `{folder}` is damaged in {counted(len(problems), 'place')}.",
            *problems,
            "Every byte has a checksum in its checkpoint.json.\n  Copy it again, or load an older checkpoint.",
        ]
        raise CheckpointError("\n  ".join(lines))


def _fresh(saved: Saved, existing: torch.Tensor | None = None) -> torch.Tensor:
    """Reads into `existing` if it has the same form, else into new memory on the CPU."""
    fits = existing is not None and (tuple(existing.shape), existing.dtype) == (saved.spec.shape, saved.spec.dtype)
    # The caller may have set another default device.
    spec = saved.spec
    out = existing if existing is not None and fits else torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    saved.read(out)
    return out


def _state(
    encoded: Any, stored: Mapping[str, Saved], existing: torch.Tensor | None, place: str, maps: Maps | None
) -> Any:
    """Reads one state of one parameter; only a state that is itself a tensor may be read in place, or stay there."""
    is_tensor = isinstance(encoded, dict) and "!tensor" in encoded

    def read(saved: Saved) -> torch.Tensor:
        mapped = (
            saved.mapped(maps) if is_tensor and maps is not None and existing is None and saved.spec.shape else None
        )
        return _fresh(saved, existing if is_tensor else None) if mapped is None else mapped

    return filled(decoded(encoded, stored, read), existing, place)
