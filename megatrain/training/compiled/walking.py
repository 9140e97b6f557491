"""Walks: runs of a model's own code, without a capture and without a schedule; and who gets a thread's calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from megatrain.base.torch_features import check_torch
from megatrain.device.device_budget import DeviceBudget
from megatrain.planning.options import Limits
from megatrain.runtime.engine import Engine
from megatrain.runtime.on_demand import Learned, WalkFigures
from megatrain.runtime.walk import walk
from megatrain.tracer.inventory import check_plain_state


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


Taker = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Gets a call of a `Compiled`, which comes first, and returns its result."""


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


def run_here(compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call of a compiled model, or hands it to the taker of this thread's calls."""
    taker = _HERE.taker
    return compiled(*args, **kwargs) if taker is None else taker(compiled, args, kwargs)


class Walks:
    """The walks of one model.

    Attributes:
        latest: The figures of the latest walk.
        peak_bytes: Most bytes of the device that a walk held.
    """

    def __init__(self, model: nn.Module, options: Limits, budget: DeviceBudget) -> None:
        self.latest: WalkFigures | None = None
        self.peak_bytes = 0
        self._model = model
        self._options = options
        self._budget = budget
        self._learned = Learned()

    @contextmanager
    def walk(self, what: str, engine_of: Callable[[], Engine], turn: AbstractContextManager[None]) -> Generator[None]:
        """Runs the body as a walk; within another walk of this thread it is a part of that.

        Args:
            what: The call that walks.
            engine_of: Returns the model's engine.
            turn: Entered around the walk: nobody else uses the model, and no updates are due.
        """
        if walks_here(self._model):
            yield
            return
        check_torch()
        check_plain_state(self._model)
        with turn, walking(self._model):
            engine = engine_of()
            if self._options.transfer == "bind":  # the device's memory is the host's: the state is there
                if engine.has_unread_weights:
                    engine.adopt_state()
                self.latest = WalkFigures(what)
                yield
            else:
                yield from self._on_device(what, engine)

    def _on_device(self, what: str, engine: Engine) -> Generator[None]:
        figures: Callable[[], WalkFigures] | None = None
        try:
            with walk(what, self._model, engine, self._budget.nbytes, self._learned) as figures:
                yield
        except RuntimeError as error:
            if "device" in str(error) and not isinstance(error, torch.OutOfMemoryError):
                error.add_note(_ELSEWHERE.format(device=self._options.device))
            raise
        finally:
            if figures is not None:
                self.latest = figures()
                self.peak_bytes = max(self.peak_bytes, self.latest.peak_bytes)


_ELSEWHERE = (
    "in a walk, parameters and buffers look as if they were on {device}; all other tensors are where they are.\n"
    "  Move the inputs there. A tensor that the model keeps in a plain attribute must be a buffer, as for .to()."
)
