"""Room: if memory runs out while a checkpoint is read, the error is a `CheckpointError`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from megatrain.errors import CheckpointError

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
