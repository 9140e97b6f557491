"""Processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.processes import Processes
from tests.simulated_device.loading import unavailable


@pytest.fixture(scope="package")
def three() -> Iterator[Processes]:
    made = Processes(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    made = Processes(4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def devices() -> Iterator[Processes]:
    """Three, each with a simulated device."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    made = Processes(3, simulated=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def four_devices() -> Iterator[Processes]:
    """Four of them."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    made = Processes(4, simulated=True)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test of ranks."""
