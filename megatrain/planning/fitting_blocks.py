"""first_that_fits(): plans a step with pieces and blocks as large as fit; with_true_hint(): would smaller ones help?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.errors import ScheduleError, TooSmallError
from megatrain.hardware.hardware import Hardware
from megatrain.passes.program import Program
from megatrain.planning.step_programs import StepPrograms
from megatrain.scheduler.builder.bound import step_bound
from megatrain.scheduler.builder.build import SMALLER_BLOCKS
from megatrain.scheduler.schedule import Schedule

# Fractions of the largest block's state. The last is of single calls: nothing is smaller, but activations may be more.
_SHIFTS = (1, 3, 63)
# Above the bound of all plans of the same blocks: nearer ones gain nothing by smaller blocks.
_FAR = 0.15


def first_that_fits(
    captures: Sequence[StepPrograms],
    plan: Callable[[Sequence[Program]], Schedule],
    machine: Hardware | None = None,
    memory: int | None = None,
    *,
    may_cut: bool = True,
) -> tuple[int, Sequence[Program], Schedule]:
    """Plans a step, and rewrites its programs as little as it needs to fit.

    Blocks get smaller where nothing fits otherwise. On a known machine they also get smaller where a step takes 15 %
    longer than its bound, as with a single slot for weights, in which copies wait for compute, and gets shorter so.

    Args:
        captures: One per micro-batch; all are rewritten at the same level.
        plan: Makes a plan of programs.
        machine: The machine, if plans are made for its times.
        memory: Bytes of the device that plans are made for, if they are.
        may_cut: Whether blocks may get smaller. Ranks that train together have the same blocks, and plan apart.

    Returns:
        The level, its programs, and their plan.

    Raises:
        TooSmallError: If none fits: of the programs that need the least.
    """
    tries = _Tries(captures, plan, may_cut=may_cut)
    found = tries.first(tries.start)
    if found is None:
        # If the smallest blocks don't fit, others won't.
        others = range(tries.start + tries.width, tries.end, tries.width)
        if not others or tries.at(tries.end - 1) is None:
            raise min(tries.errors, key=lambda error: error.least_bytes)
        found = next(each for each in map(tries.first_of_last, others) if each is not None)
    return found if machine is None else tries.faster(found, machine, memory)


_Found = tuple[int, Sequence[Program], Schedule]


class _Tries:
    """Plans of levels.

    Args:
        captures: One per micro-batch.
        plan: Makes a plan of programs.
        may_cut: Whether there are levels with other blocks.

    Attributes:
        start: The first level.
        width: The number of levels with blocks of one size.
        end: Behind the last level.
        errors: Why levels don't fit.
    """

    def __init__(
        self, captures: Sequence[StepPrograms], plan: Callable[[Sequence[Program]], Schedule], *, may_cut: bool
    ):
        self._captures, self._plan = captures, plan
        self._known: dict[tuple[int, ...], Schedule | None] = {}
        self.start = max(each.least for each in captures)
        self.width = captures[0].width
        last = max(each.last for each in captures)
        self.end = 1 + last if may_cut else (self.start // self.width + 1) * self.width
        self.errors: list[TooSmallError] = []

    def first(self, level: int) -> _Found | None:
        """The first that fits, of this level and those behind it with blocks of its size."""
        end = (level // self.width + 1) * self.width
        return next((found for found in map(self.at, range(level, end)) if found is not None), None)

    def first_of_last(self, level: int) -> _Found | None:
        """As `first`, if the smallest pieces fit in blocks of this size."""
        last = level - level % self.width + self.width - 1
        return None if self.at(last) is None else self.first(level)

    def at(self, level: int) -> _Found | None:
        """The plan of a level; None if it doesn't fit."""
        programs = [each.at(level) for each in self._captures]
        key = tuple(map(id, programs))
        if key not in self._known:
            try:
                self._known[key] = self._plan(programs)
            except TooSmallError as error:
                self._known[key] = None
                self.errors.append(error)
            except ScheduleError:
                if level < self.width:
                    raise
                self._known[key] = None  # two parts of a block may have to stay in one
        found = self._known[key]
        return None if found is None else (level, programs, found)

    def faster(self, found: _Found, machine: Hardware, memory: int | None) -> _Found:
        """Smaller blocks, in the same or smaller pieces, where that makes a step shorter."""
        schedule = found[2]
        bound = step_bound(schedule.effects(), memory, machine)
        if bound.above(schedule.simulate(machine).step_s) < _FAR:
            return found
        smaller = map(self.first, range(found[0] + self.width, self.end, self.width))
        fits = [found, *(each for each in smaller if each is not None)]
        return min(fits, key=lambda each: each[2].simulate(machine).step_s)


def with_true_hint(error: TooSmallError, program: Program, plan: Callable[[int], object]) -> TooSmallError:
    """Returns the error with what a smaller `block_bytes` does: it fits, it needs less, or it isn't named.

    Not every tensor can be cut: the weight of one linear layer can't, nor stacked experts that an adapter is added to.

    Args:
        error: Of the program as it is.
        program: The program.
        plan: Plans it anew with blocks of so many bytes; raises a `ScheduleError` if that doesn't fit.
    """
    if SMALLER_BLOCKS not in error.helps:
        return error
    largest = max(map(program.state_bytes, program.blocks), default=0)
    least = error.least_bytes
    for size in sorted({max(1, largest >> shift) for shift in _SHIFTS}, reverse=True):
        try:
            plan(size)
        except TooSmallError as finer:
            least = min(least, finer.least_bytes)
        except ScheduleError:
            continue  # two parts of a block may have to stay in one
        else:
            return error
    smaller = [] if least == error.least_bytes else [f"{SMALLER_BLOCKS} ({least} B are needed then)"]
    helps = [each for hint in error.helps for each in (smaller if hint == SMALLER_BLOCKS else [hint])]
    return TooSmallError(error.text, error.least_bytes, helps)
