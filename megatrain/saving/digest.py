"""Digest: the SHA-256 of pieces, computed on a thread while the next piece is read or written."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor

_ALONE = 2**20
"""Pieces below this are done on the spot: handing them over takes as long."""


class Digest:
    """The SHA-256 of what it was given so far."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def begin(self, piece: memoryview) -> None:
        """Takes in a piece, which must stay as it is until the next call of any method."""
        self.wait()
        if len(piece) < _ALONE:
            self._hash.update(piece)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatrain-digest")
        self._pending = self._thread.submit(self._hash.update, piece)

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
        """Ends the thread, if there is one."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def digest_of(text: bytes) -> str:
    """Returns the SHA-256 of `text` in hexadecimal."""
    return hashlib.sha256(text).hexdigest()
