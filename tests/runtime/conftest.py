"""What the tests of the runtime share."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from megatrain.runtime.streams.stream_set import StreamSet
from tests.bad_values import guarded
from tests.captures import OF_MANY_FILES, lowered_once
from tests.runtime.stepping import CPU, TIMEOUT_S


@pytest.fixture(autouse=True, scope="module")
def _once() -> Generator[None]:
    """Of the same models in each mode."""
    with lowered_once(OF_MANY_FILES):
        yield


@pytest.fixture
def streams() -> Iterator[StreamSet]:
    found = StreamSet(CPU)
    yield found
    found.close()


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Turns a hang of the main thread into a failure."""

    with guarded(TIMEOUT_S):
        yield
