"""Processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from tests.captures import OF_MANY_FILES, lowered_once, rehearsed_once
from tests.ranks.processes import Processes, processes_fixture

three = processes_fixture(3, "package")
devices = processes_fixture(3, simulated=True)


@pytest.fixture
def three_anew() -> Generator[Callable[[], Processes]]:
    """Makes three new processes each time; they end with the test."""
    made: list[Processes] = []

    def new() -> Processes:
        for each in made:
            each.close()
        made.append(Processes(3))
        return made[-1]

    yield new
    for each in made:
        each.close()


@pytest.fixture(scope="package", autouse=True)
def _once() -> Generator[None]:
    """What one process computes is compiled once for each model, as in the processes of the ranks."""
    with lowered_once(OF_MANY_FILES), rehearsed_once():
        yield


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test of ranks."""
