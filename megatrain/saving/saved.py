"""Saved: one tensor of a checkpoint; its values are read piece by piece and compared with their checksum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.graph import increment_version

from megatrain.device import is_on_host
from megatrain.errors import CheckpointError
from megatrain.files.disk import Digest, bytes_of, room_to_read
from megatrain.files.weight_files import PIECE_BYTES, parts
from megatrain.memory.host_arena import scratch
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
        left = self.spec.numel
        reader = _Reader(self)
        try:
            while left:
                piece = buffer[: min(room, left)]
                reader.fill(bytes_of(piece), piece_bytes)
                left -= piece.numel()
                reader.wait()
                yield piece
            reader.finish()
        finally:
            reader.close()

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
        if is_on_host(target) and target.is_contiguous() and not target.is_conj() and not target.is_neg():
            self._fill(target)
            # numpy wrote to it, which autograd doesn't see.
            if not out.is_inference():
                increment_version(out)
            return
        reader = _Reader(self)
        try:
            for part in parts(target, max(1, PIECE_BYTES // out.dtype.itemsize)):
                values = scratch(part.shape, out.dtype)
                reader.fill(bytes_of(values), PIECE_BYTES)
                part.copy_(values)
            reader.finish()
        finally:
            reader.close()

    def check(self) -> None:
        """Reads all and keeps nothing.

        Raises:
            CheckpointError: As `pieces`.
        """
        for _ in self.pieces():
            pass

    def _fill(self, target: torch.Tensor) -> None:
        reader = _Reader(self)
        try:
            reader.fill(bytes_of(target), PIECE_BYTES)
            reader.finish()
        finally:
            reader.close()


class _Reader:
    """Reads a tensor from its first byte, and computes the checksum."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._digest = Digest()
        try:
            self._file = saved.file.open("rb", buffering=0)
        except OSError as error:
            raise self._failed(str(error)) from error
        self._file.seek(saved.start)

    def fill(self, target: memoryview, piece_bytes: int) -> None:
        """Reads the next bytes; they may change after `wait`."""
        while len(target):
            try:
                count = self._file.readinto(target[:piece_bytes])
            except OSError as error:
                raise self._failed(str(error)) from error
            if not count:
                raise self._failed("the file ends too early")
            self._digest.begin(target[:count])
            target = target[count:]

    def wait(self) -> None:
        self._digest.wait()

    def finish(self) -> None:
        """Compares the checksum."""
        if self._digest.finish() != self._saved.digest:
            raise self._failed("its bytes differ from the saved ones")

    def close(self) -> None:
        self._digest.close()
        self._file.close()

    def _failed(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"`{self._saved.name}` in `{self._saved.file}` is damaged: {reason}.\n"
            "  Each tensor is compared with its checksum from the save.\n"
            "  Copy the file again, or load an older checkpoint. Tensors that were read before this one have new "
            "values already."
        )
