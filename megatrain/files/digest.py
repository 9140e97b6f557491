"""Digest: the SHA-256 of pieces, computed on a thread while the next piece is read or written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

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
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Returns when nothing is left to do."""
        self.wait()


def digest_of(text: bytes) -> str:
    """Returns the SHA-256 of `text` in hexadecimal."""
    return hashlib.sha256(text).hexdigest()
