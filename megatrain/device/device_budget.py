"""DeviceBudget: the device memory that schedules of a model may take, found out once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from megatrain.base.sizes import format_bytes
from megatrain.device import Device
from megatrain.errors import DeviceMemoryWarning

# As a rule more than torch's allocator loses in holes. Less takes more attempts, more costs time in each step.
_PART = 8


class DeviceBudget:
    """A bound of the device memory that schedules count, the same for all schedules of a compiled model.

    Without a figure it is what is free before the first schedule, less the device's reserve. It is asked once: later
    the model itself holds memory, and what torch's allocator keeps looks taken. It gets smaller when a step ran out of
    memory all the same. Figures that are given stay as they are, but leave the reserve of the whole device free.
    """

    def __init__(self, device: Device, given: int | None) -> None:
        self._device = device
        self._given = given
        self._nbytes: int | None = None
        self._first = 0

    @property
    def nbytes(self) -> int:
        """The bound in bytes; the first use asks the device.

        It warns with a `DeviceMemoryWarning` if a given figure is more than is free.
        """
        if self._nbytes is None:
            self._nbytes = self._first = self._found()
        return self._nbytes

    def lower(self, scheduled: int) -> bool:
        """Makes a bound that nobody gave smaller, after a schedule of so many bytes ran out of memory.

        Returns:
            Whether it did: a given bound stays.
        """
        if self._given is not None or self._device.is_host:
            return False
        self._nbytes = scheduled - scheduled // _PART
        return True

    def agree(self, exchange: Callable[[int], Sequence[int]]) -> None:
        """Takes the smallest bound of several processes, so that all of them plan alike."""
        if not self._device.is_host:
            self._nbytes = self._first = min(exchange(self.nbytes))

    def restore(self, nbytes: int) -> None:
        """Takes smaller bounds back that didn't help."""
        self._nbytes = nbytes

    def _found(self) -> int:
        device, given = self._device, self._given
        if given is not None and device.can_bind:
            return given  # the host's own memory: a rehearsal of a device
        free, total = device.memory()
        if given is None:
            return free - device.reserve(free)
        bound = min(given, total - device.reserve(total))
        if bound > free:
            warnings.warn(
                f"memory={format_bytes(given)} is more than is free: {format_bytes(free)} of {device} are, of "
                f"{format_bytes(total)}.\n"
                "  Schedules may take as much as memory= says, and a step for which this isn't there runs out of "
                "memory.\n"
                "  End what else uses the device, or give a smaller budget (memory=, or --memory on the command line).",
                DeviceMemoryWarning,
                stacklevel=2,
            )
        return bound

    def __str__(self) -> str:
        """The bound, where it comes from, and the reserve; asks no device before the first schedule."""
        if self._nbytes is None:
            return "what is free" if self._given is None else format_bytes(self._given)
        bound = format_bytes(self._nbytes)
        if self._given is None:
            less = "a reserve, lowered after a step ran out of memory" if self._nbytes < self._first else "a reserve"
            return f"{bound} (what was free, less {less})"
        if self._nbytes < self._given:
            return f"{bound} ({format_bytes(self._given)} was given; the rest is a reserve)"
        return bound
