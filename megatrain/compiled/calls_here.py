"""What becomes of the calls of compiled models that this thread makes: somebody takes them, or a walk is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from megatrain.compiled.inside import Compiled

Taker = Callable[["Compiled", tuple[Any, ...], dict[str, Any]], Any]
"""Gets a call of a compiled model, and returns its result."""


class _CallsHere(threading.local):
    taker: Taker | None = None
    walking: tuple[nn.Module, ...] = ()


_HERE = _CallsHere()


@contextmanager
def taken_by(taker: Taker) -> Generator[None]:
    """Within the body `taker` gets this thread's calls of compiled models."""
    before, _HERE.taker = _HERE.taker, taker
    try:
        yield
    finally:
        _HERE.taker = before


@contextmanager
def walking(model: nn.Module) -> Generator[None]:
    """Within the body, this thread's calls of the compiled model are calls of the model itself."""
    before, _HERE.walking = _HERE.walking, (*_HERE.walking, model)
    try:
        yield
    finally:
        _HERE.walking = before


def walks_here(model: nn.Module) -> bool:
    """Tells whether this thread is in a walk of this model."""
    return any(each is model for each in _HERE.walking)


def run_here(compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call of a compiled model, or hands it to the taker of this thread's calls."""
    taker = _HERE.taker
    return compiled(*args, **kwargs) if taker is None else taker(compiled, args, kwargs)
