"""SimulatedDevice: the simulated device as megatrain sees it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from megatrain.device import Accelerator
from megatrain.errors import ExecuteError
from megatrain.sizes import format_bytes
from tests.simulated_device.simulated_graphs import SimulatedGraphs
from tests.simulated_device.simulator import Simulator
from tests.simulated_device.staged_collectives import StagedCollectives
from tests.simulated_device.torch_module import NAME


class SimulatedDevice(Accelerator):
    """A device whose page locking is that of the simulator; all else is torch's generic interface.

    Args:
        simulator: The simulated device of this process.
        index: Its number; None takes the current one.
    """

    repeats_itself = True  # each kernel is the CPU's, on one thread
    has_launch_graphs = True

    def __init__(self, simulator: Simulator, index: int | None = None) -> None:
        super().__init__(NAME, index)
        self.simulator = simulator

    def collectives(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Through host memory: there are no links."""
        return StagedCollectives(store, rank, size, timeout)

    def launch_graphs(self) -> SimulatedGraphs:
        """As CUDA graphs, with memory that each run poisons where it frees it."""
        return SimulatedGraphs(self.simulator, self.torch_device)

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        """Registers the memory with the simulator."""
        code = self.simulator.lock(address, nbytes)
        if code != 0:
            raise ExecuteError(f"{format_bytes(nbytes)} of host memory can't be page-locked: error {code}.")
        return partial(self._unlock, address)

    def _unlock(self, address: int) -> None:
        code = self.simulator.unlock(address)
        assert code == 0, f"unlocking host memory at {address:#x} failed: error {code}"
