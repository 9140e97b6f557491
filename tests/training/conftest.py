"""What the tests of training steps share: few models, with the same optimizers in each mode."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.captures import OF_MANY_FILES, lowered_once, rehearsed_once


@pytest.fixture(autouse=True, scope="module")
def _once() -> Generator[None]:
    with lowered_once(OF_MANY_FILES), rehearsed_once():
        yield
