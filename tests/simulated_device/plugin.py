"""Pytest plugin that loads the simulated device: `pytest -p tests.simulated_device.plugin`."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from tests.hidden_accelerators import hide_accelerators
from tests.simulated_device.loading import load, unavailable
from tests.simulated_device.simulator import Simulator


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    hide_accelerators()  # tests/gpu is named beside this plugin, and must find the simulated one
    if unavailable() is None:
        load()
        # The bits of a product depend on how many threads share it; kernels use one, and so eager runs must.
        torch.set_num_threads(1)


def pytest_report_header() -> str:
    return f"simulated device: {unavailable() or 'loaded'}"


@pytest.fixture
def sim() -> Generator[Simulator]:
    """The simulated device, as after loading, before and after the test."""
    simulator = load()
    simulator.reset()
    yield simulator
    simulator.reset()
