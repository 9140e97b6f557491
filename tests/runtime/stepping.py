"""What the tests of streams share: issuing operations and a small step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatrain.device import Cpu
from megatrain.runtime.streams.stream_set import Event, StreamSet

CPU = Cpu()
STREAMS = ("h2d", "compute", "d2h", "host")
# What is waited for comes in milliseconds, or on a loaded machine in many seconds; a hang never ends.
TIMEOUT_S = 300.0


def issue(streams: StreamSet, stream: str, label: str, work: Callable[[], Any], waits: tuple[Event, ...] = ()) -> Event:
    done = Event(label)
    streams.submit(stream, label, work, waits, done)
    return done


def nothing() -> None:
    pass


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run_chain(streams: StreamSet, log: list[str], num_blocks: int = 4) -> None:
    """A small step: prefetch, compute, offload for each block, two slots, and an update on the host."""
    computed: list[Event] = []
    for block in range(num_blocks):
        slot_free = tuple(computed[block - 2 : block - 1])
        w = issue(streams, "h2d", f"W{block}", lambda b=block: log.append(f"W{b}"), slot_free)
        f = issue(streams, "compute", f"F{block}", lambda b=block: log.append(f"F{b}"), (w,))
        computed.append(f)
        g = issue(streams, "d2h", f"G{block}", lambda b=block: log.append(f"G{b}"), (f,))
        issue(streams, "host", f"U{block}", lambda b=block: log.append(f"U{b}"), (g,))


def run_step(streams: StreamSet, body: Callable[[], None]) -> None:
    with streams.step():
        body()


ALL = [f"{kind}{block}" for block in range(4) for kind in "WFGU"]
