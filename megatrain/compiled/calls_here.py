"""Who takes the calls of compiled models that this thread makes, in place of running them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.compiled.inside import Compiled

Taker = Callable[["Compiled", tuple[Any, ...], dict[str, Any]], Any]
"""Gets a call of a compiled model, and returns its result."""


class _CallsHere(threading.local):
    taker: Taker | None = None


_HERE = _CallsHere()


@contextmanager
def taken_by(taker: Taker) -> Generator[None]:
    """Within the body `taker` gets this thread's calls of compiled models."""
    before, _HERE.taker = _HERE.taker, taker
    try:
        yield
    finally:
        _HERE.taker = before


def run_here(compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call of a compiled model, or hands it to the taker of this thread's calls."""
    taker = _HERE.taker
    return compiled(*args, **kwargs) if taker is None else taker(compiled, args, kwargs)
