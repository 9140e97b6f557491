"""Processes that the tests of a module share."""

from __future__ import annotations

import pytest

from tests.ranks.shared_processes import processes_fixture

three = processes_fixture(3, "package")
four = processes_fixture(4)
devices = processes_fixture(3, simulated=True)
four_devices = processes_fixture(4, simulated=True)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test of ranks."""
