"""KeptArena: host memory for transfers that is kept from step to step, and grows."""

from __future__ import annotations

from megatrain.memory.bus import Bus
from megatrain.memory.host_arena import HostArena


class KeptArena:
    """Host memory for transfers, page-locked where they gain from that, and kept; grows if more is needed.

    Args:
        bus: Does the transfers.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.memory = HostArena(0)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes

    def ensure(self, nbytes: int) -> HostArena:
        """Returns the memory, at least `nbytes`; other memory than before if it had to grow.

        Raises:
            ExecuteError: If the host can't give it.
        """
        if nbytes > self.memory.nbytes:
            self.memory = self.bus.arena(nbytes)
        return self.memory
