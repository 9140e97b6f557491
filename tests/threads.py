"""Threads of streams: those of other tests are theirs to end."""

from __future__ import annotations

import threading


def living(before: set[threading.Thread]) -> list[str]:
    """Names of the streams' threads that have come since and don't end."""
    new = [t for t in threading.enumerate() if t not in before and t.name.startswith("megatrain")]
    for thread in new:
        thread.join(timeout=300)  # on a loaded machine; one that is kept alive never ends
    return [thread.name for thread in new if thread.is_alive()]
