"""The tensors in safetensors files: their specs from headers and indexes, their values piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open

from megatrain.base.checks import shown
from megatrain.device.host_arena import HostArena, scratch
from megatrain.device.host_pages import fetch
from megatrain.errors import WeightsError
from megatrain.files.json_file import is_inside, of_kind, read_json, regular
from megatrain.tracer.spec import TensorSpec, dtype_name

WeightFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a folder, or several of them."""

PIECE_BYTES = 4 * 2**20
"""Bytes that are converted at a time; values that need no conversion are read straight into place."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Element types by the names that files have for them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file.

    Args:
        dtype: Element type; None for one that torch has no arithmetic for.
        kind: Element type as the file spells it.
        start: Its first byte, from the start of the file.
        stamp: Size and time of change of the file when its header was read.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    kind: str
    start: int
    stamp: tuple[int, int]

    def __str__(self) -> str:
        kind = self.kind if self.dtype is None else dtype_name(self.dtype)
        return f"{kind}[{', '.join(map(str, self.shape))}] in {self.file.name}"

    @property
    def piece_numel(self) -> int:
        """How many elements are read at a time where they are converted."""
        assert self.dtype is not None
        return PIECE_BYTES // self.dtype.itemsize

    def fits(self, dtype: torch.dtype) -> bool:
        """Tells whether values can be read as `dtype`: the same one, or both floating-point."""
        if self.dtype is None:
            return False
        return self.dtype == dtype or (self.dtype.is_floating_point and dtype.is_floating_point)

    def read(self, out: torch.Tensor) -> None:
        """Reads the values.

        Args:
            out: On the CPU, of this shape, with any strides and any dtype that `fits`; takes no memory beyond
                one piece.

        Raises:
            WeightsError: If the file is gone, was changed, or can't be read.
        """
        if out.dtype == self.dtype and out.is_contiguous():
            self._fill(out, self.start)
            return
        for part, values in self.pieces(out):
            part.copy_(values)

    def equals(self, tensor: torch.Tensor) -> bool:
        """Tells whether the values, converted to the dtype of `tensor`, are its values bit for bit."""
        for part, values in self.pieces(tensor):
            expected = part.contiguous().reshape(-1).view(torch.uint8)
            if not torch.equal(values.to(part.dtype).reshape(-1).view(torch.uint8), expected):
                return False
        return True

    def pieces(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields parts of a tensor of this shape, each with the values that the file has for it.

        They are those of `parts(tensor, limit)`, with as many elements at the most as a piece of the file has.
        """
        assert self.dtype is not None
        assert tuple(tensor.shape) == self.shape
        start = self.start
        buffer = torch.empty(0, dtype=self.dtype, device="cpu")
        for part in parts(tensor, self.piece_numel):
            if buffer.numel() < part.numel():
                buffer = scratch((part.numel(),), self.dtype)
            values = buffer[: part.numel()].view(part.shape)
            self._fill(values, start)
            start += values.nbytes
            yield part, values

    def _fill(self, out: torch.Tensor, start: int) -> None:
        """Reads bytes into a contiguous tensor.

        Read and not mapped: pages of a mapped file count as this process's memory, twice the weights at the worst.
        """
        if not out.numel():
            return
        target = memoryview(out.detach().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        try:
            with self.file.open("rb", buffering=0) as file:
                _check_stamp(self.file, file.fileno(), self.stamp)
                file.seek(start)
                while len(target):
                    count = file.readinto(target)
                    if not count:
                        raise OSError("the file ends too early")
                    target = target[count:]
        except OSError as error:
            raise _unreadable(self.file, error) from error


class MappedFile:
    """A file of weights whose tensors are used where they are: in the system's cache of files.

    A write into one of these tensors takes memory of this process, and leaves the file as it is.

    Args:
        path: The file.
        arena: All bytes of the file.
        ways_out: What to do if somebody changes the file.
    """

    def __init__(self, path: Path, arena: HostArena, descriptor: int, ways_out: str) -> None:
        self._path, self._descriptor, self.arena, self._ways_out = path, descriptor, arena, ways_out
        self._stamp = _stamp(descriptor)

    @staticmethod
    def of(stored: Stored) -> MappedFile | None:
        """Maps the file of a tensor; None where the system can't.

        Raises:
            WeightsError: If the file is gone, was changed, or can't be read.
        """
        return MappedFile.whole(stored.file, _FROZEN, stored.stamp)

    @staticmethod
    def whole(path: Path, ways_out: str, stamp: tuple[int, int] | None = None) -> MappedFile | None:
        """Maps a file, which must have this stamp if one is given; as `of`."""
        try:
            with path.open("rb", buffering=0) as file:
                if stamp is not None:
                    _check_stamp(path, file.fileno(), stamp)
                arena = HostArena.of_file(file.fileno())
                return None if arena is None else MappedFile(path, arena, os.dup(file.fileno()), ways_out)
        except OSError as error:
            raise _unreadable(path, error) from error

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)

    def check(self) -> None:
        """Refuses values that may not be those that were mapped.

        A file that was removed, or replaced by another, keeps its values until nobody uses them.

        Raises:
            WeightsError: If somebody has written into the file, or cut it off.
        """
        if _stamp(self._descriptor) != self._stamp:
            raise self._changed("was changed")

    def fetch(self, source: torch.Tensor) -> None:
        """Reads bytes of `arena` from the disk, unless the system has them; several threads read several at a time.

        Raises:
            WeightsError: If the file ends before them, or the disk fails.
        """
        if not fetch(source.data_ptr(), source.nbytes):
            raise self._changed("can't be read any more")

    def _changed(self, what: str) -> WeightsError:
        return WeightsError(f"`{self._path}` {what} while {self._ways_out}")


_FROZEN = (
    "frozen weights are used from it.\n"
    "  The host has no room for a copy, so steps read them there. What is trained is in memory, and whole.\n"
    "  Save that (adapters by their library, or TrainStep.save(folder, weights=False)), put the file back, and "
    "compile again."
)


class Maps:
    """Tensors of a checkpoint that are used in its files, by a host that has no room for copies.

    A write into one takes memory, and leaves the file as it is. A file that is removed stays until nobody uses it.

    Attributes:
        nbytes: Of all tensors.
    """

    def __init__(self) -> None:
        self._files: dict[Path, MappedFile | None] = {}
        self.nbytes = 0

    def check(self) -> None:
        """Refuses values that may not be those that were mapped.

        Raises:
            WeightsError: As `MappedFile.check`.
        """
        for file in self._files.values():
            if file is not None:
                file.check()

    def tensor(self, path: Path, start: int, spec: TensorSpec) -> torch.Tensor | None:
        """A contiguous tensor over the bytes of a file from `start` on; None where it can't be used there."""
        if not spec.nbytes or start % spec.dtype.itemsize:
            return None
        if path not in self._files:
            self._files[path] = MappedFile.whole(path, _STATE)
        file = self._files[path]
        if file is None:
            return None
        self.nbytes += spec.nbytes
        return file.arena.part(start, start + spec.nbytes).view(spec.dtype).view(spec.shape)


_STATE = (
    "the optimizer's state is used from it.\n"
    "  The host had no room for a copy when the checkpoint was loaded.\n"
    "  Load it again, from files that nobody writes."
)


def read_paths(weights: WeightFiles) -> tuple[Path, ...]:
    """Reads the option `weights` of `compile`."""
    paths = [weights] if isinstance(weights, str | os.PathLike) else weights
    return tuple(Path(path) for path in paths)


def open_checkpoint(paths: Sequence[Path]) -> dict[str, Stored]:
    """Reads the headers of safetensors files, and nothing else of them.

    Args:
        paths: Files; folders, of which the index or else every `*.safetensors` is taken; indexes
            (`*.safetensors.index.json`).

    Raises:
        WeightsError: Naming the file that is missing, broken, or holds a name that another one holds too.
    """
    found: dict[str, Stored] = {}
    for file in dict.fromkeys(file for path in paths for file in _files(path)):
        for name, stored in _header(file).items():
            if name in found:
                raise WeightsError(
                    f"`{name}` is in `{found[name].file}` and in `{file}`.\n"
                    "  A name must be in one file only: nothing says which file counts.\n"
                    "  Give weights= the list of files that belong together."
                )
            found[name] = stored
    for path in paths:
        for index in indexes_of(path):
            _check_index(index, found)
    return found


def _files(path: Path) -> list[Path]:
    if not exists(path):
        raise WeightsError(f"`{path}` does not exist.\n  weights is a safetensors file, or a folder with such files.")
    indexes = indexes_of(path)
    if len(indexes) > 1:
        names = ", ".join(f"`{index.name}`" for index in indexes)
        raise WeightsError(
            f"`{path}` has several indexes: {names}.\n  Each index describes other weights.\n"
            "  Give weights= the index that you want."
        )
    if indexes:
        return list(dict.fromkeys(read_index(indexes[0]).values()))
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise WeightsError(
            f"`{path}` has no *.safetensors in it.\n  Only safetensors can be read tensor by tensor.\n"
            "  Save the weights with safetensors.torch.save_file."
        )
    return files


def _check_index(index: Path, found: Mapping[str, Stored]) -> None:
    for name, file in read_index(index).items():
        if name not in found or found[name].file != file:
            raise WeightsError(
                f"`{file}` has no `{name}`, but `{index.name}` says that it has.\n  Index and files belong together.\n"
                "  Copy both again, or give weights= the list of files."
            )


def _header(path: Path) -> dict[str, Stored]:
    """Lists the tensors of a file; the library checks that the header is sound and the file complete."""
    try:
        if not regular(path):
            raise OSError("it isn't a file")
        with safe_open(str(path), framework="np"):
            pass
        with path.open("rb") as file:
            stamp = _stamp(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return {
        name: Stored(
            name,
            path,
            tuple(entry["shape"]),
            DTYPES.get(entry["dtype"]),
            entry["dtype"],
            8 + length + entry["data_offsets"][0],
            stamp,
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _check_stamp(path: Path, descriptor: int, stamp: tuple[int, int]) -> None:
    if _stamp(descriptor) != stamp:
        raise WeightsError(
            f"`{path}` was changed after compile(weights=...) had checked it.\n"
            "  compile compared the headers with the model; the values are read only now.\n"
            "  Compile again, or call load_weights() before the file is written."
        )


def _unreadable(path: Path, error: Exception) -> WeightsError:
    return WeightsError(
        f"`{path}` can't be read as safetensors: {error}.\n"
        "  The file is cut off, damaged, or of another format.\n"
        "  Copy it again, or save the weights with safetensors.torch.save_file."
    )


def parts(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Cuts a tensor along the leading dimensions into parts of at most `limit` elements."""
    if tensor.numel() <= limit:
        yield tensor
        return
    rows = max(1, limit // (tensor.numel() // tensor.shape[0]))
    for part in tensor.split(rows):
        yield from [part] if part.numel() <= limit else parts(part[0], limit)


ENDING = ".safetensors.index.json"


class Index(TypedDict):
    """What an index holds. Those who write one add fields of their own."""

    weight_map: dict[str, str]


def indexes_of(path: Path) -> list[Path]:
    """Lists the indexes in a folder, or the one that `path` is."""
    if path.is_dir():
        return sorted(path.glob(f"*{ENDING}"))
    return [path] if path.name.endswith(ENDING) else []


def read_index(index: Path) -> dict[str, Path]:
    """Returns the file of each name that an index lists.

    Raises:
        WeightsError: If it can't be read, isn't an `Index`, or names a file that isn't there.
    """
    try:
        listed = of_kind(read_json(index), Index, "it")["weight_map"]
    except (OSError, ValueError) as error:
        raise _no_index(index, str(error)) from error
    outside = next((file for file in listed.values() if not is_inside(file)), None)
    if outside is not None:
        raise _no_index(index, f"it has {shown(outside)}, not the name of a file in this folder")
    files = {each: index.parent / file for each, file in listed.items()}
    for file in dict.fromkeys(files.values()):
        if not exists(file):
            raise WeightsError(
                f"`{file}` does not exist, but `{index.name}` names it.\n  Every file of an index is needed.\n"
                "  Copy the missing file next to the index."
            )
    return files


def exists(file: Path) -> bool:
    """Tells whether a path exists; a path that the system can't take doesn't exist."""
    try:
        return file.exists()
    except (OSError, ValueError):  # too long, say, or with a NUL in it
        return False


def _no_index(index: Path, reason: str) -> WeightsError:
    return WeightsError(
        f"`{index}` isn't an index of safetensors files: {reason}.\n"
        '  An index is JSON that maps each name to a file in its own folder, under "weight_map".\n'
        "  Copy it again, or give weights= the list of files."
    )
