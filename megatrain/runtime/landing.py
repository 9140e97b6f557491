"""Landing: host memory where the gradients of a step arrive, and wait for their update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.device import Device
from megatrain.memory.block_image import BlockImage, image, views
from megatrain.memory.host_arena import HostArena
from megatrain.runtime.loaded import Loaded
from megatrain.scheduler.instructions import Bytes


class LandingArena:
    """The memory, allocated once and kept from step to step; grows if a later schedule needs more.

    Args:
        device: Compute device; page-locked for its transfers where they gain from that.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arena = HostArena(0)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._arena.nbytes

    def ensure(self, nbytes: int) -> torch.Tensor:
        """Returns the memory, at least so large. Views of an earlier, smaller memory keep that memory alive.

        Raises:
            ExecuteError: If the host can't give it.
        """
        if nbytes > self._arena.nbytes:
            self._arena = HostArena(nbytes, pin=self._device)
        return self._arena.tensor


class Landing:
    """Each block's gradients as tensors where they land on the host.

    Args:
        nbytes: Bytes of all of them; some may use the same bytes one after another.
        loaded: What runs.
        arena: Where they are.
    """

    def __init__(self, nbytes: int, loaded: Loaded, arena: LandingArena):
        self._arena = arena
        self._nbytes = nbytes
        self._layouts = _layouts(loaded)
        self._keys = [block.binding for block in loaded.program.blocks]
        self._memory: torch.Tensor | None = None
        self._places: dict[int, list[torch.Tensor | None]] = {}

    def places(self, block: int, where: Bytes) -> Sequence[torch.Tensor | None]:
        """Returns where the gradients of a block's state go, in its order; None for what isn't trained.

        Args:
            block: Whose gradients.
            where: Their bytes, the same each time.
        """
        memory = self._arena.ensure(self._nbytes)
        if memory is not self._memory:
            self._memory = memory
            self._places.clear()
        if block not in self._places:
            layout = self._layouts[block]
            found = views(layout, memory[where.offset : where.offset + layout.nbytes])
            by_key = {entry.key: tensor for entry, tensor in zip(layout.entries, found, strict=True)}
            self._places[block] = [by_key.get(key) for key in self._keys[block]]
        return self._places[block]


def _layouts(loaded: Loaded) -> list[BlockImage]:
    state = loaded.program.state
    return [
        image([(key, state[key].spec) for key in dict.fromkeys(block.binding) if state[key].requires_grad])
        for block in loaded.program.blocks
    ]
