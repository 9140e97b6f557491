"""Warns when a whole model runs its own code as one block, so that all of its weights must fit on the device."""

from __future__ import annotations

import warnings

from megatrain.errors import OpaqueModelWarning, TraceError
from megatrain.tracer.recording.opaque import Opaque
from megatrain.tracer.traced import TracedModule

OPAQUE = ("warn", "refuse", "allow")


def check_opaque(traced: TracedModule, opaque: str, heard: set[str]) -> None:
    """Warns of a capture whose outermost module is opaque, or refuses it.

    Args:
        traced: The capture.
        opaque: One of `OPAQUE`.
        heard: Reasons of earlier warnings; this reason is added.

    Raises:
        TraceError: If `opaque` says so.
    """
    targets = (node.target for node in traced.graph.nodes)
    reason = next((t.reason for t in targets if isinstance(t, Opaque) and not t.name), None)
    if reason is None or opaque == "allow" or (opaque == "warn" and reason in heard):
        return
    heard.add(reason)
    text = (
        f"the whole model is one opaque block: it {reason}.\n"
        "  No graph can repeat this code: the outermost module runs its own code, and all weights must fit on the "
        "device.\n"
        "  Move this code into an inner module, or out of the model"
    )
    if opaque == "refuse":
        raise TraceError(f"{text}.")
    warnings.warn(f'{text}; opaque="allow" silences this warning.', OpaqueModelWarning, stacklevel=2)
