"""Fixtures of processes that the tests of a module, or of more, share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks.processes import Processes
from tests.simulated_device.loading import unavailable


def processes_fixture(size: int, scope: Any = "module", *, simulated: bool = False) -> Any:
    """A fixture: so many processes, which end with its scope.

    Args:
        size: How many.
        scope: Of the fixture, as pytest's.
        simulated: Each has the simulated device; where there is none, tests are skipped.
    """

    @pytest.fixture(scope=scope)
    def processes() -> Iterator[Processes]:
        reason = unavailable() if simulated else None
        if reason is not None:
            pytest.skip(reason)
        made = Processes(size, simulated=simulated)
        yield made
        made.close()

    return processes
