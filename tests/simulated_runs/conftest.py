"""Tests of megatrain on the simulated device run where its plugin has loaded it."""

from __future__ import annotations

import pytest

from tests.simulated_device.loading import is_loaded, unavailable


def pytest_runtest_setup() -> None:
    if not is_loaded():
        pytest.skip(unavailable() or "run by `pytest -p tests.simulated_device.plugin`")
