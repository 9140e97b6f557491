"""What the tests of training steps share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.captures import rehearsed_once


@pytest.fixture(autouse=True, scope="module")
def _rehearsed_once() -> Generator[None]:
    """Of few models, with the same optimizers in each mode."""
    with rehearsed_once():
        yield
