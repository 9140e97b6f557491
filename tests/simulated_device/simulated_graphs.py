"""SimulatedGraphs: what CUDA graphs are on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from megatrain.device import LaunchGraphs
from tests.simulated_device.simulator import Simulator


class SimulatedGraphs(LaunchGraphs):
    """Recorded work of the simulated device.

    Args:
        simulator: The simulated device of this process.
        device: Which of its devices.
    """

    def __init__(self, simulator: Simulator, device: torch.device) -> None:
        super().__init__(device)
        self._simulator = simulator
        self._stream = torch.Stream(device=device)
        self._drop: Callable[[], object] = lambda: None
        self.release()

    def release(self) -> None:
        """Takes other memory."""
        self._drop()
        self._memory = self._simulator.private_memory(self._device.index)
        self._drop = weakref.finalize(self, self._simulator.drop_memory, self._memory)

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Records on a stream of its own; waits and reads of numbers are refused, as by CUDA."""
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            with self._simulator.recording(self._device.index, self._memory) as recorded:
                recording = _Recording(self._simulator, self._device.index, recorded)
                work()
        finally:
            torch.accelerator.set_stream(before)
        return recording.replay

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Reads the address."""
        return torch.ops.sim.memory(address, nbytes, self._device.index)


class _Recording:
    def __init__(self, simulator: Simulator, index: int, recorded: int) -> None:
        self._simulator, self._index, self._recorded = simulator, index, recorded
        weakref.finalize(self, simulator.drop_recorded, recorded)

    def replay(self) -> None:
        self._simulator.replay(self._index, self._recorded)
