"""Processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks.processes import Processes


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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are split among threads, and each of the processes has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
