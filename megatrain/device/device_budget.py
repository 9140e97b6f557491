"""The device memory that schedules of a model may take, and what happens when there is less in the middle of a step."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import torch

from megatrain.base.sizes import format_bytes
from megatrain.device import Device
from megatrain.errors import DeviceMemoryWarning, ExecuteError, TooSmallError


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


# As a rule more than torch's allocator loses in holes. Less takes more attempts, more costs time in each step.
_PART = 8
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
