"""What the tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatrain.runtime.streams.stream_set import StreamSet
from tests.runtime.stepping import CPU


@pytest.fixture
def streams() -> Iterator[StreamSet]:
    found = StreamSet(CPU)
    yield found
    found.close()
