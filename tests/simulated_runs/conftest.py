"""Tests of megatrain on the simulated device run where its plugin has loaded it."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.captures import OF_MANY_FILES, lowered_once
from tests.simulated_device.loading import is_loaded, unavailable


def pytest_runtest_setup() -> None:
    if not is_loaded():
        pytest.skip(unavailable() or "run by `pytest -p tests.simulated_device.plugin`")


@pytest.fixture(autouse=True, scope="module")
def _once() -> Generator[None]:
    """Of few models, in each mode and order."""
    with lowered_once(OF_MANY_FILES):
        yield
