"""What happens when the device has too little memory in the middle of a step: frees, figures, and the error."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch

from megatrain.base.sizes import format_bytes
from megatrain.device import Device
from megatrain.device.device_budget import DeviceBudget
from megatrain.errors import DeviceMemoryWarning, ExecuteError, TooSmallError


class DeviceMemoryError(ExecuteError, torch.OutOfMemoryError):
    """The device ran out of memory twice in the same work, the second time with an empty cache."""


def ran_out(error: BaseException, device: Device) -> bool:
    """Tells whether an error, or the one behind it on another thread, says that the device had too little memory."""
    return any(device.ran_out(cause) for cause in _chain(error))


def free_frames(error: BaseException) -> None:
    """Frees the tensors that only the frames of an error keep alive: another attempt needs their memory."""
    for cause in _chain(error):
        traceback.clear_frames(cause.__traceback__)


def let_go(error: BaseException, device: Device) -> None:
    """As `free_frames`; also frees what torch's allocator keeps for later."""
    free_frames(error)
    device.empty_cache()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it comes from, without what a caller of the work was handling when the work began.

    The traceback of an error begins at the frame that has caught the error. What a caller handles was caught further
    out: its frames are the caller's, who may still look at them.
    """
    callers: set[FrameType] = set()
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ is not None else None
    while frame is not None:
        callers.add(frame)
        frame = frame.f_back
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if found.__traceback__ is None or found.__traceback__.tb_frame not in callers:
            yield found
            left += [found.__cause__, found.__context__]


_MOST_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """What a step was planned to take of the device, and what it took.

    Args:
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
        """Returns the error for the user, with the notes of its cause, which say where the work ended."""
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
        self._warn(f"{what} was repeated with an empty cache")

    def warn_lowered(self, what: str) -> None:
        """Says that something was repeated with a smaller budget, which all that follows has."""
        self._warn(f"{what} was repeated with a smaller budget, which further ones keep")

    def _warn(self, repeated: str) -> None:
        warnings.warn(
            f"{self.device} ran out of memory; {repeated}, and has the same numbers.\n  {self}\n  {_WAYS_OUT}",
            DeviceMemoryWarning,
            stacklevel=2,
        )


class Attempts:
    """The first attempt at some work, and further ones if the device ran out of memory.

    The second has an empty cache. Further ones have a smaller budget, if nobody gave one.

    Args:
        budget: Of what is planned anew in each attempt; None if nothing is.
    """

    def __init__(self, what: str, device: Device, budget: DeviceBudget | None = None):
        self._what = what
        self._device = device
        self._budget = budget
        self._count = 1
        self._error: DeviceMemoryError | None = None
        self._before: int | None = None  # the budget before it was lowered

    def may_repeat(self, error: BaseException, figures: MemoryFigures | None, *, is_undone: bool = True) -> bool:
        """Tells whether to do the work again after an error; frees what its frames keep if so.

        Without figures the work hadn't begun, and isn't repeated; with `is_undone` the failed attempt left no trace.

        Raises:
            DeviceMemoryError: If the device ran out of memory and the work can't be repeated any more.
        """
        repeats = False
        try:
            repeats = self._repeats(error, figures, is_undone=is_undone)
        finally:
            if not repeats and self._budget is not None and self._before is not None:
                self._budget.restore(self._before)  # smaller ones didn't help
        return repeats

    def _repeats(self, error: BaseException, figures: MemoryFigures | None, *, is_undone: bool) -> bool:
        if self._error is not None and isinstance(error, TooSmallError):
            raise self._error from error  # the budget is too small only because it was lowered
        if figures is None or not ran_out(error, self._device):
            return False
        let_go(error, self._device)
        if self._count > 1 or not is_undone:
            self._error = self._error or figures.error(error, self._what)
            if not (is_undone and self._count < _MOST_ATTEMPTS and self._lowers(figures)):
                raise self._error from error
        self._count += 1
        return True

    def _lowers(self, figures: MemoryFigures) -> bool:
        if self._budget is None:
            return False
        before = self._budget.nbytes
        is_lowered = self._budget.lower(figures.scheduled)
        if is_lowered and self._before is None:
            self._before = before
        return is_lowered

    def over(self, figures: MemoryFigures, *, is_half: bool = False) -> None:
        """Ends the work; warns if it took several attempts, or if a half of it did."""
        if self._error is not None:
            figures.warn_lowered(self._what)
        elif self._count > 1 or is_half:
            figures.warn(self._what if self._count > 1 else f"the rest of {self._what}")


_WAYS_OUT = (
    "Give a smaller budget (memory=, or --memory on the command line), or end what else uses the device; with "
    "PYTORCH_ALLOC_CONF=expandable_segments:True torch's allocator wastes less."
)
