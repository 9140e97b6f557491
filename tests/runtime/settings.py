"""Settings that the models of `test_stale.py` read as attributes of a module."""

from __future__ import annotations

GAIN = 1.5


def gain() -> float:
    """Returns the setting, from one function further away."""
    return GAIN
