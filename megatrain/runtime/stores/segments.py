"""Segments: torch's allocator gets memory for what a step holds, before temporary tensors leave it theirs.

The allocator gives a tensor the smallest free memory into which it fits. Between two blocks that is memory of temporary
tensors: a value of 12 MiB goes into 32 MiB that a product had, and stays there until its backward. What is left of them
fits no other value, and no product. So up to half of what a step holds could be lost in holes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.device import Device
from megatrain.passes.program import Program
from megatrain.runtime.stores.segment_sizes import segment_sizes
from megatrain.scheduler.schedule import Schedule


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
            self._sizes = segment_sizes(*self._of)
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
        """Has the allocator take some segments at once, and keep them.

        Then each tensor of these sizes takes its own memory, the smallest into which it fits. Segments that were made
        for more than these stay instead, unless the allocator's cache was emptied since.

        Args:
            sizes: Bytes of each segment, largest first.
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
