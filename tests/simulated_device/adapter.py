"""SimulatedDevice: the simulated device as megatrain sees it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatrain.base.sizes import format_bytes
from megatrain.device import Accelerator, LaunchGraphs
from megatrain.errors import ExecuteError
from tests.simulated_device.simulator import Simulator
from tests.simulated_device.torch_module import NAME


class StagedCollectives:
    """What moves memory between the devices of some processes; see `megatrain.device.Device.collectives`."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        self._host: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank = rank

    def broadcast(self, tensors: Sequence[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        """Sends a tensor to all, behind the work of the current stream and ahead of what follows there."""
        (tensor,) = tensors
        is_root = options.rootRank == self._rank
        staged = tensor.cpu() if is_root else torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Staged(self._host.broadcast([staged], options), staged, None if is_root else tensor)


class _Staged:
    """A broadcast under way between hosts; who waits for it copies it to the device."""

    def __init__(self, work: Any, staged: torch.Tensor, out: torch.Tensor | None):
        self._work, self._staged, self._out = work, staged, out

    def is_completed(self) -> bool:
        """Whether it is over on the host."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Copies it, as work of the current stream."""
        self._work.wait()
        if self._out is not None:
            self._out.copy_(self._staged)


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
