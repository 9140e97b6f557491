"""Which models this thread walks through: calls of their compiled models are calls of the models themselves."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


class _Walked(threading.local):
    models: tuple[nn.Module, ...] = ()


_WALKED = _Walked()


@contextmanager
def walking(model: nn.Module) -> Generator[None]:
    """Notes that the body is a walk of this model."""
    before, _WALKED.models = _WALKED.models, (*_WALKED.models, model)
    try:
        yield
    finally:
        _WALKED.models = before


def walks_here(model: nn.Module) -> bool:
    """Tells whether this thread is in a walk of this model."""
    return any(each is model for each in _WALKED.models)
