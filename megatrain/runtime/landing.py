"""Landing: host memory where the gradients of a step arrive, and wait for their update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import torch

from megatrain.runtime.image import BlockImage, image, views
from megatrain.runtime.loaded import Loaded
from megatrain.runtime.pages import HostArena
from megatrain.scheduler.schedule import Schedule


class LandingArena:
    """The memory, allocated once and kept from step to step; grows if a later schedule needs more.

    Args:
        device: Compute device; page-locked for its transfers where that is CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena = HostArena(0)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._arena.nbytes

    def ensure(self, nbytes: int) -> torch.Tensor:
        """Returns the memory, at least so large. What lies in a smaller one stays there as long as somebody views it.

        Raises:
            ExecuteError: If the host can't give it.
        """
        if nbytes > self._arena.nbytes:
            self._arena = HostArena(nbytes, pin=self._device)
        return self._arena.tensor


class Landing:
    """The places of one schedule: each block's gradients have theirs from their G to the U that uses them.

    Places are reused within a step where the schedule lets gradients wait for their own update only: a G waits for
    updates of earlier ticks.

    Args:
        schedule: Of a whole step.
        loaded: What runs.
        arena: Where the places are.
    """

    def __init__(self, schedule: Schedule, loaded: Loaded, arena: LandingArena):
        self._arena = arena
        self._layouts = _layouts(loaded)
        self._offsets, self.nbytes = place(schedule, [layout.nbytes for layout in self._layouts])
        self._keys = [block.binding for block in loaded.program.blocks]
        self._memory: torch.Tensor | None = None
        self._places: dict[int, list[torch.Tensor | None]] = {}

    def places(self, block: int) -> Sequence[torch.Tensor | None]:
        """Returns where the gradients of a block's state go, in its order; None for what isn't trained."""
        memory = self._arena.ensure(self.nbytes)
        if memory is not self._memory:
            self._memory = memory
            self._places.clear()
        if block not in self._places:
            layout, start = self._layouts[block], self._offsets.get(block, 0)  # without a G it has no bytes
            found = views(layout, memory[start : start + layout.nbytes])
            by_key = {entry.key: tensor for entry, tensor in zip(layout.entries, found, strict=True)}
            self._places[block] = [by_key.get(key) for key in self._keys[block]]
        return self._places[block]


def _layouts(loaded: Loaded) -> list[BlockImage]:
    state = loaded.program.state
    return [
        image([(key, state[key].spec) for key in dict.fromkeys(block.binding) if state[key].requires_grad])
        for block in loaded.program.blocks
    ]


def place(schedule: Schedule, sizes: Sequence[int]) -> tuple[Mapping[int, int], int]:
    """Gives each block's gradients bytes, so that those alive at the same tick don't overlap.

    Args:
        schedule: Of a whole step.
        sizes: Bytes of each block's gradients.

    Returns:
        The first byte by block, for those that have a `G`, and the bytes in all.
    """
    starts = {op.block: p.tick for p, op in schedule.positions() if op.what == "G"}
    updates = {op.block: p.tick for p, op in schedule.positions() if op.what == "U"}
    is_of_this_step = schedule.kind.updates in ("overlap", "serial")
    ends: dict[int, float] = dict.fromkeys(starts, -inf if is_of_this_step else inf)
    workload = schedule.known_workload()
    for owner, tick in updates.items() if is_of_this_step else ():
        for member in workload.update_group(owner):
            ends[member] = max(ends.get(member, -inf), tick)
    offsets: dict[int, int] = {}
    alive: list[tuple[int, int, float]] = []  # first byte, byte after the last, and when it ends; by first byte
    for block in sorted(starts, key=starts.__getitem__):
        alive = [life for life in alive if life[2] >= starts[block]]
        start = 0
        for low, high, _ in alive:
            if start + sizes[block] <= low:
                break
            start = max(start, high)
        offsets[block] = start
        alive = sorted([*alive, (start, start + sizes[block], ends[block])])
    return offsets, max((offsets[block] + sizes[block] for block in offsets), default=0)
