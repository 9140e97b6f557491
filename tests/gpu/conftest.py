"""On a card, kernels that sum in another order each time are left out: the bits of a run are then eager's."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
import torch

from tests.captures import OF_MANY_FILES, lowered_once
from tests.simulated_device import is_loaded

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs


def pytest_configure(config: pytest.Config) -> None:
    """torch warns where a product of autograd's thread is the first of the process."""
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")


@pytest.fixture(autouse=True)
def _deterministic_algorithms() -> Generator[None]:
    """The simulated device has no others."""
    torch.use_deterministic_algorithms(not is_loaded())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="module")
def _once() -> Generator[None]:
    """Of few models, in each mode and order."""
    with lowered_once(OF_MANY_FILES):
        yield
