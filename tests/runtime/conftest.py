"""What the tests of the runtime share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from megatrain.runtime.streams.stream_set import StreamSet
from tests.runtime.stepping import CPU, TIMEOUT_S


@pytest.fixture
def streams() -> Iterator[StreamSet]:
    found = StreamSet(CPU)
    yield found
    found.close()


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Turns a hang of the main thread into a failure."""

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError("a wait did not end")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
