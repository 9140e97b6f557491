"""What happens when the device has too little memory in the middle of a step: frees, figures, and the error."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatrain.device import Device
from megatrain.errors import DeviceMemoryWarning, ExecuteError
from megatrain.sizes import format_bytes


class DeviceMemoryError(ExecuteError, torch.OutOfMemoryError):
    """The device ran out of memory twice in the same work, the second time with an empty cache."""


def ran_out(error: BaseException, device: Device) -> bool:
    """Tells whether an error, or the one behind it on another thread, says that the device had too little memory."""
    return any(device.ran_out(cause) for cause in _chain(error))


def let_go(error: BaseException, device: Device) -> None:
    """Frees the tensors that only the frames of an error keep alive, and what torch's allocator keeps for later."""
    for cause in _chain(error):
        traceback.clear_frames(cause.__traceback__)
    device.empty_cache()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            left += [found.__cause__, found.__context__]


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """What a step was planned to take of the device, and what it took.

    Args:
        device: The device.
        budget: The bound of schedules in bytes; None if there was none.
        scheduled: `device_bytes` of the schedule.
        held: Most bytes that slots, values and gradients took.
    """

    device: Device
    budget: int | None
    scheduled: int
    held: int

    def __str__(self) -> str:
        budget = "no budget" if self.budget is None else f"a budget of {format_bytes(self.budget)}"
        allocated = self.device.peak_bytes()
        gave = "" if allocated is None else f", and torch's allocator gave out {format_bytes(allocated)}"
        return (
            f"There is {budget}, of which the schedule counts {format_bytes(self.scheduled)}. "
            f"Slots, values and gradients took {format_bytes(self.held)} at most{gave}."
        )

    def error(self, cause: BaseException, what: str) -> DeviceMemoryError:
        """Returns the error for the user.

        Args:
            cause: The second failure; its notes, which say where the work ended, are kept.
            what: What was tried twice.
        """
        reason = str(cause).strip().splitlines()
        error = DeviceMemoryError(
            f"{self.device} ran out of memory. It did again when {what} was repeated with an empty cache: "
            f"{reason[0] if reason else type(cause).__name__}\n  {self}\n  {_WAYS_OUT}"
        )
        error.__cause__ = cause
        for note in getattr(cause, "__notes__", ()):
            error.add_note(note)
        return error

    def warn(self, what: str) -> None:
        """Says that something was repeated, which costs time."""
        warnings.warn(
            f"{self.device} ran out of memory; {what} was repeated with an empty cache, and has the same numbers.\n"
            f"  {self}\n  {_WAYS_OUT}",
            DeviceMemoryWarning,
            stacklevel=2,
        )


class Attempts:
    """The first attempt at some work, and a second one if the device ran out of memory in the first.

    Args:
        what: The work, for texts.
        device: The device.
    """

    def __init__(self, what: str, device: Device):
        self._what = what
        self._device = device
        self._is_second = False

    def may_repeat(self, error: BaseException, figures: MemoryFigures, *, is_undone: bool = True) -> bool:
        """Tells whether to do the work again after an error; frees what its frames keep if so.

        Args:
            error: What failed.
            figures: For the error that is raised.
            is_undone: The failed attempt left no trace.

        Raises:
            DeviceMemoryError: If the device ran out of memory and the work can't be repeated any more.
        """
        if not ran_out(error, self._device):
            return False
        let_go(error, self._device)
        if self._is_second or not is_undone:
            raise figures.error(error, self._what) from error
        self._is_second = True
        return True

    def over(self, figures: MemoryFigures, *, is_half: bool = False) -> None:
        """Ends the work; warns if it took two attempts, or if a half of it did."""
        if self._is_second or is_half:
            figures.warn(self._what if self._is_second else f"the rest of {self._what}")


_WAYS_OUT = (
    "Give a smaller budget (memory=, or --memory on the command line), or end what else uses the device; with "
    "PYTORCH_ALLOC_CONF=expandable_segments:True torch's allocator wastes less."
)
