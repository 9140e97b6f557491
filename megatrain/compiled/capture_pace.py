"""CapturePace: notices a model that is captured anew at most of its calls, which may take longer than the calls."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence

from megatrain.errors import ManyCapturesWarning
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.spec import TensorSpec

LATEST = 16
"""How many calls are looked at."""
MANY = 12
"""So many captures among them are told. A model has a few shapes, which come again; or always another one."""


class CapturePace:
    """Warns once if most of the latest calls were captured."""

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=LATEST)
        self._inputs: Mapping[str, str] = {}
        self._has_warned = False

    def note_call(self) -> None:
        """Notes a call for which there was a capture."""
        self._recent.append(False)

    def note_capture(self, arguments: Arguments, reasons: Sequence[str]) -> None:
        """Notes a call that was captured.

        Args:
            arguments: Of the call.
            reasons: Why earlier captures of the same signature didn't fit.
        """
        self._recent.append(True)
        before, self._inputs, seen = self._inputs, _described(arguments), len(self._recent)
        if self._has_warned or sum(self._recent) < MANY:
            return
        self._has_warned = True
        warnings.warn(
            f"{MANY} of the latest {seen} calls were captured anew.\n"
            f"  The latest: {_what_changed(before, self._inputs, reasons)}.\n"
            "  A capture and its plan may take longer than a call, and are kept. Let shapes come again: pad to a "
            "multiple, or pack. docs/trainers.md says how, under batches of many shapes.",
            ManyCapturesWarning,
            stacklevel=2,
        )


def _described(arguments: Arguments) -> dict[str, str]:
    return {name: str(TensorSpec.of(tensor)) for name, tensor in zip(arguments.names, arguments.tensors, strict=True)}


def _what_changed(before: Mapping[str, str], now: Mapping[str, str], reasons: Sequence[str]) -> str:
    """Names the input whose shape isn't that of the capture before, or else what a capture read."""
    for name, spec in now.items():
        if before.get(name, spec) != spec:
            return f"`{name}` is {spec}, and was {before[name]}"
    return reasons[0].splitlines()[0] if reasons else "other arguments than before"
