"""How many examples a hypothesis test draws: a quarter of its number in `make test`, all of them in `make nightly`.

Where an example takes seconds, a test says how many `make test` draws.

The profile decides, in tests/conftest.py: its `max_examples` is a percentage.
"""

from __future__ import annotations

from hypothesis import settings


def has_time() -> bool:
    """Whether there is time for all examples, and for the cases that a shorter run leaves out."""
    return settings().max_examples >= 100


def draws(count: int, usual: int | None = None) -> settings:
    """Decorates a test that is to draw `count` examples where there is time for all of them, and else `usual`."""
    part = count * settings().max_examples // 100
    return settings(max_examples=max(1, part if usual is None or has_time() else usual))
