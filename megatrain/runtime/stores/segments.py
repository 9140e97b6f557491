"""Segments: torch's allocator gets memory for what a step holds, before temporary tensors leave it theirs.

The allocator gives a tensor the smallest free memory into which it fits. Between two blocks that is memory of temporary
tensors: a value of 12 MiB goes into 32 MiB that a product had, and stays there until its backward. What is left of them
fits no other value, and no product. So up to half of what a step holds could be lost in holes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatrain.device import Device
from megatrain.passes.program import Program
from megatrain.scheduler.books import Books, alive_at, find_peak
from megatrain.scheduler.schedule import Schedule

# Smaller tensors are in segments of 2 MiB of their own, whatever is free elsewhere.
LEAST_BYTES = 1 << 20


def held_sizes(schedule: Schedule, programs: Sequence[Program]) -> list[int]:
    """Bytes of each large tensor that a step makes and holds at its peak, besides slots; largest first.

    Args:
        schedule: The schedule.
        programs: One per micro-batch.
    """
    found: list[int] = []
    for life in alive_at(Books(schedule), find_peak(schedule).tick):
        kind, number, micro_batch, _ = life.item
        if life.start is None:
            continue  # the caller's
        program = programs[micro_batch]
        if kind == "saved":
            found += _saved_parts(program, number)
        elif kind == "parameters":
            states = (program.state[key] for key in program.blocks[number].binding)
            found += (state.spec.nbytes for state in states if state.requires_grad)
        else:
            found.append(life.nbytes)
    return sorted((nbytes for nbytes in found if nbytes > LEAST_BYTES), reverse=True)


def _saved_parts(program: Program, block: int) -> Iterator[int]:
    cost = program.templates[program.blocks[block].template].cost
    yield from () if cost is None else cost.saved_parts


class ScheduleSegments:
    """The segments of one schedule.

    Args:
        segments: Of the model.
        schedule: The schedule.
        programs: One per micro-batch.
    """

    def __init__(self, segments: Segments, schedule: Schedule, programs: Sequence[Program]) -> None:
        self._segments = segments
        self._of = schedule, programs
        self._sizes: list[int] | None = None

    def make(self) -> None:
        """See `Segments.make`."""
        if self._sizes is None:
            self._sizes = held_sizes(*self._of)
        self._segments.make(self._sizes)


class Segments:
    """The memory that torch's allocator was given for the steps of a model.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nbytes = 0
        self._num_emptied = 0

    def of(self, schedule: Schedule, programs: Sequence[Program]) -> ScheduleSegments:
        """Returns what makes the segments of a schedule, whose sizes are looked up when they are first needed."""
        return ScheduleSegments(self, schedule, programs)

    def make(self, sizes: Sequence[int]) -> None:
        """Has the allocator take memory for some tensors at once, each a segment of its own, and keep it.

        Then each tensor of these sizes takes its own segment, the smallest into which it fits. Segments that were made
        for more than these stay instead, unless the allocator's cache was emptied since.

        Args:
            sizes: Bytes of each tensor, largest first.
        """
        is_there = self._num_emptied == self._device.num_emptied
        if is_there and sum(sizes) <= self._nbytes:
            return
        taken: list[torch.Tensor] = []
        try:
            self._device.empty_cache()  # segments are cut from nothing that is there
            taken.extend(map(self._device.allocate, sizes))
        except BaseException as error:
            # Something else takes the device's memory. Some segments are better than none.
            if not self._device.ran_out(error):
                raise
        self._nbytes, self._num_emptied = sum(sizes), self._device.num_emptied
