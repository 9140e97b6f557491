"""with_true_hint(): whether smaller blocks would help a step that needs too much memory, found by planning these."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.errors import ScheduleError, TooSmallError
from megatrain.passes.program import Program
from megatrain.scheduler.builder.budget import SMALLER_BLOCKS

# Fractions of the largest block's state. The last is of single calls: nothing is smaller, but activations may be more.
_SHIFTS = (1, 3, 63)


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
