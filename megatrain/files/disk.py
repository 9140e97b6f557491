"""Files on the disk: their bytes, their digests, and whether they are there for good."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from megatrain.base.torch_private import is_traceable_wrapper_subclass
from megatrain.device import is_on_host
from megatrain.device.host_arena import scratch
from megatrain.errors import CheckpointError
from megatrain.files.weight_files import DTYPES, PIECE_BYTES, parts
from megatrain.tracer.spec import TensorSpec

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
"""Names that safetensors has for element types."""

Place = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to write, or a function that makes its values while they are written.

    Args:
        spec: Shape and dtype of the stored tensor, contiguous.
        pieces: Gives the values in the order of the elements, as contiguous tensors on the CPU of `spec.dtype`. Each
            is read before the next is asked for, so one buffer may serve for all. Called once for each save.
        place: Where in memory the values lie; two sources with the same place are stored once. None: nowhere.
    """

    spec: TensorSpec
    pieces: Callable[[], Iterator[torch.Tensor]] = field(repr=False)
    place: Place | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> Source:
        """Describes a tensor that can be stored (see `obstacle`); takes no memory beyond a piece.

        Args:
            tensor: On any device but meta, with any strides.
        """
        tensor = tensor.detach()
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        place = None
        if tensor.numel():
            place = (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        return Source(spec, lambda: _pieces(tensor), place)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for part in parts(tensor, max(1, PIECE_BYTES // tensor.dtype.itemsize)):
        is_plain = is_on_host(part) and part.is_contiguous() and not part.is_conj() and not part.is_neg()
        # The copy also resolves what torch keeps lazily: conjugates, negatives.
        yield part if is_plain else scratch(part.shape, part.dtype).copy_(part)


def obstacle(tensor: torch.Tensor) -> str | None:
    """Says why a tensor can't be stored, if it can't."""
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return f"is a {type(tensor).__name__} of layout {tensor.layout}, whose values are not plain numbers"
    if tensor.dtype not in KINDS:
        return f"is {tensor.dtype}, a dtype that safetensors doesn't have"
    return None


def without_ties(sources: Mapping[str, Source]) -> tuple[dict[str, Source], dict[str, str]]:
    """Separates names for the same memory.

    Returns:
        The sources, each memory under its first name; and for every other name the name that is stored.
    """
    first: dict[Place, str] = {}
    ties: dict[str, str] = {}
    for name, source in sources.items():
        if source.place is not None and first.setdefault(source.place, name) != name:
            ties[name] = first[source.place]
    return {name: source for name, source in sources.items() if name not in ties}, ties


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; writing to it changes the tensor."""
    # Strides of dimensions of size 1 mean nothing, and `reshape` may keep one of them.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]


_ALONE = 2**20
"""Pieces below this are done on the spot: handing them over takes as long."""

_worker: ThreadPoolExecutor | None = None


def _hand_over(work: Callable[[memoryview], None], piece: memoryview) -> Future[None]:
    # One thread for the whole process: where memory is short, Python may wait for ever for a thread that it starts.
    global _worker
    if _worker is None:
        _worker = ThreadPoolExecutor(1, thread_name_prefix="digest")
    return _worker.submit(work, piece)


def _forget() -> None:
    global _worker
    _worker = None  # a forked process has no threads but its own


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_forget)


class Digest:
    """The SHA-256 of all pieces so far."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pending: Future[None] | None = None

    def begin(self, piece: memoryview) -> None:
        """Takes in a piece, which must stay as it is until the next call of any method."""
        self.wait()
        if len(piece) < _ALONE:
            self._hash.update(piece)
        else:
            self._pending = _hand_over(self._hash.update, piece)

    def wait(self) -> None:
        """Returns when the last piece is taken in and may change."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def finish(self) -> str:
        """Returns the digest in hexadecimal."""
        self.wait()
        return self._hash.hexdigest()


def digest_of(text: bytes) -> str:
    """Returns the SHA-256 of `text` in hexadecimal."""
    return hashlib.sha256(text).hexdigest()


_SAID = ("can't allocate memory", "not enough memory", "out of memory", "can't start new thread")
"""In what torch and Python raise, as a RuntimeError of no class of its own."""


@contextmanager
def room_to_read() -> Generator[None]:
    """Turns a failed allocation in the body into a `CheckpointError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error) or type(error).__name__
        if not isinstance(error, MemoryError) and not any(said in text.lower() for said in _SAID):
            raise
        raise CheckpointError(
            f"the memory is too small to read the checkpoint: {text.splitlines()[0]}.\n"
            "  The optimizer's state takes additional memory. Tensors that were read already have new values.\n"
            "  Free memory and load again: an undamaged checkpoint sets all tensors right."
        ) from error


@contextmanager
def locked(file: Path) -> Generator[None]:
    """Holds the lock of `file`, which is made if it isn't there, and stays. The lock ends with the process in any case.

    Raises:
        BlockingIOError: If another process holds it, or this one does already.
        OSError: If the system refuses the file, or its file system has no locks.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BlockingIOError(f"`{file}` is locked") from error
    except NotImplementedError as error:  # what some versions of filelock say of such a file system
        raise OSError(str(error)) from error
    try:
        yield
    finally:
        lock.release()


def make(folder: Path) -> None:
    """Makes a folder in one that exists."""
    folder.mkdir()


def write(file: RawIOBase, piece: memoryview) -> None:
    """Writes all of `piece`."""
    while len(piece):
        count = file.write(piece)
        assert count is not None, "a file on a disk is never without room for now"
        piece = piece[count:]


def sync(file: RawIOBase) -> None:
    """Returns when the contents of `file` would survive a loss of power."""
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Returns when the names in `folder` would survive a loss of power; Windows can't be asked for that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Renames a folder; `target` doesn't exist or is empty."""
    source.rename(target)


def unlink(file: Path) -> None:
    """Removes a file; another process may have been faster."""
    file.unlink(missing_ok=True)


def rmdir(folder: Path) -> None:
    """Removes an empty folder; another process may have been faster."""
    with suppress(FileNotFoundError):
        folder.rmdir()


def remove(folder: Path) -> None:
    """Removes a folder with all its contents."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove(path)
        else:
            unlink(path)
    rmdir(folder)
